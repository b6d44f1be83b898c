"""Which blocks make one value in a store.

Stores are fast with values of 512 KiB to 4 MiB (measured on Redis and Valkey: below
that each command costs more than its bytes, and at 7 MiB and more Redis' allocator
slows down). So smaller blocks are grouped: value *n* of a sequence holds its blocks
``[n * size, (n + 1) * size)``, the last one perhaps fewer, and bears the hash of the
last block in it, which covers all that come before. Larger blocks are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sam_connector.config import StoreConfig
from sam_connector.core.slot_pool import Content
from sam_connector.core.types import BlockHash, GroupId


class Value(NamedTuple):
    """Consecutive blocks of one group that are one value."""

    group_id: GroupId
    hashes: tuple[BlockHash, ...]

    @property
    def chunk(self) -> Content:
        """Its identity: the group and the last block's hash."""
        return self.group_id, self.hashes[-1]

    @property
    def contents(self) -> list[Content]:
        return [(self.group_id, block_hash) for block_hash in self.hashes]


@dataclass(frozen=True, slots=True)
class ValueShape:
    """How the blocks of each group are grouped or cut.

    Attributes:
        num_blocks: blocks in one value.
        num_parts: values of one block; more than one only where ``num_blocks`` is 1.
    """

    num_blocks: Mapping[GroupId, int]
    num_parts: Mapping[GroupId, int]

    @classmethod
    def of(cls, record_bytes: Mapping[GroupId, int], config: StoreConfig) -> ValueShape:
        """The shape for blocks of these sizes, as one rank has them."""
        return cls(
            num_blocks={
                group_id: max(1, -(-config.store_value_bytes // size))
                for group_id, size in record_bytes.items()
            },
            num_parts={
                group_id: max(1, -(-size // config.store_max_value_bytes))
                for group_id, size in record_bytes.items()
            },
        )

    def values(
        self, group_id: GroupId, hashes: Sequence[BlockHash], block_start: int = 0
    ) -> Iterator[Value]:
        """The values of a sequence, or of a part of it.

        Args:
            group_id: the group.
            hashes: of the sequence's blocks from ``block_start`` on.
            block_start: a value that begins before it is left out.
        """
        size = self.num_blocks[group_id]
        first = -(-block_start // size) * size - block_start
        for start in range(first, len(hashes), size):
            yield Value(group_id, tuple(hashes[start : start + size]))

    def value_at(
        self, group_id: GroupId, hashes: Sequence[BlockHash], block_index: int
    ) -> Value | None:
        """The whole value that block ``block_index`` of a sequence is in, if any."""
        size = self.num_blocks[group_id]
        start = block_index // size * size
        if start + size > len(hashes):
            return None
        return Value(group_id, tuple(hashes[start : start + size]))
