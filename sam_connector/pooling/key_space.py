"""Which values a chunk of a context is, over all ranks and parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sam_connector.core.slot_pool import Content
from sam_connector.core.types import GroupId, SessionKey
from sam_connector.storage.key import ManifestKey, StoreKey

#: What one value is known by above the store: its group, and the hash of the last
#: block in it. Each rank has its share of it, perhaps in several parts.
Chunk = Content


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """Names of one engine's values.

    Attributes:
        tenant: whose blocks are.
        fingerprint: see ``StoreKey``.
        num_ranks: each has a share of every block.
        num_parts: into how many values each block of a group is cut.
    """

    tenant: str
    fingerprint: str
    num_ranks: int
    num_parts: Mapping[GroupId, int]

    def keys(self, chunk: Chunk) -> list[StoreKey]:
        """The names of all that a chunk consists of."""
        group_id, block_hash = chunk
        return [
            StoreKey(self.tenant, self.fingerprint, group_id, rank, block_hash, part)
            for rank in range(self.num_ranks)
            for part in range(self.num_parts[group_id])
        ]

    @property
    def max_keys(self) -> int:
        """Most values that one chunk consists of."""
        return self.num_ranks * max(self.num_parts.values(), default=1)

    def manifest_key(self, session: SessionKey) -> ManifestKey:
        return ManifestKey(session, self.fingerprint)
