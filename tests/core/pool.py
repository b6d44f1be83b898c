"""A stand-in for vLLM's ``BlockPool``: small, plain, and behind the core's port.

It takes, touches and frees blocks exactly as vLLM's pool does, so the core can be
driven through every engine boundary without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sam_connector.core.claim import Claim
from sam_connector.core.retention import BlockMetaUpdate
from sam_connector.core.types import BlockHash, BlockId, GroupId
from sam_connector.core.zoned_queue import ZonedFreeQueue

#: Content of a block in one KV cache group.
Content = tuple[BlockHash, GroupId]


class FakeBlock:
    """What the core and the queue see of vLLM's ``KVCacheBlock``."""

    __slots__ = (
        "block_hash",
        "block_id",
        "is_null",
        "next_free_block",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: Content | None = None
        self.is_null = False
        self.prev_free_block: Any = None
        self.next_free_block: Any = None

    def __repr__(self) -> str:
        return f"FakeBlock({self.block_id}, {self.block_hash}, ref={self.ref_cnt})"

    @property
    def is_free(self) -> bool:
        return self.next_free_block is not None


class FakePool:
    """Blocks, a zoned free list and a prefix cache that may hold duplicates.

    Args:
        num_blocks: size of the pool; block 0 becomes the null block.
        enforce: see ``ZonedFreeQueue``.
    """

    def __init__(self, num_blocks: int, *, enforce: bool = True) -> None:
        self.blocks = [FakeBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = ZonedFreeQueue(self.blocks, num_blocks, enforce=enforce)
        null_block = self.free_queue.popleft()
        null_block.is_null = True
        self.cached: dict[Content, dict[int, FakeBlock]] = {}

    # --- what vLLM's pool does -----------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    def get_new_blocks(self, num_blocks: int) -> list[FakeBlock]:
        if num_blocks > self.free_queue.num_free_blocks:
            raise ValueError(f"cannot get {num_blocks} blocks")
        blocks: list[FakeBlock] = self.free_queue.popleft_n(num_blocks)
        for block in blocks:
            assert block.ref_cnt == 0
            self.uncache(block)
            block.ref_cnt = 1
        return blocks

    def lookup(self, hashes: Iterable[BlockHash], group_id: GroupId) -> list[FakeBlock]:
        """The longest cached prefix."""
        hit = []
        for block_hash in hashes:
            copies = self.cached.get((block_hash, group_id))
            if not copies:
                break
            hit.append(next(iter(copies.values())))
        return hit

    def touch(self, blocks: Iterable[FakeBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        """Lets go of blocks; the caller names the tail of a context first."""
        unhashed: list[FakeBlock] = []
        hashed: list[FakeBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (unhashed if block.block_hash is None else hashed).append(block)
        self.free_queue.prepend_n(unhashed)
        self.free_queue.append_n(hashed)

    def cache(self, block: FakeBlock, block_hash: BlockHash, group_id: GroupId) -> None:
        block.block_hash = block_hash, group_id
        self.cached.setdefault(block.block_hash, {})[block.block_id] = block

    def uncache(self, block: FakeBlock) -> None:
        """Takes the content out of the prefix cache (vLLM's ``evict_blocks``)."""
        if block.block_hash is not None:
            copies = self.cached[block.block_hash]
            del copies[block.block_id]
            if not copies:
                del self.cached[block.block_hash]
            block.block_hash = None

    def reset(self) -> bool:
        """Empties the prefix cache, unless a block is in use."""
        if self.num_free_blocks != len(self.blocks) - 1:
            return False
        self.cached = {}
        for block in self.blocks:
            block.block_hash = None
        return True

    def holds(
        self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId
    ) -> bool:
        return self.blocks[block_id].block_hash == (block_hash, group_id)

    # --- BlockPoolPort -------------------------------------------------------

    def update_block_meta(
        self,
        *,
        block_ids: Sequence[BlockId],
        expected_block_hashes: Sequence[BlockHash],
        group_id: GroupId,
        claim: Claim,
    ) -> list[BlockMetaUpdate]:
        return [
            self._update_one(block_id, expected, group_id, claim)
            for block_id, expected in zip(block_ids, expected_block_hashes, strict=True)
        ]

    def _update_one(
        self, block_id: BlockId, expected: BlockHash, group_id: GroupId, claim: Claim
    ) -> BlockMetaUpdate:
        if not 0 < block_id < len(self.blocks) or self.blocks[block_id].is_null:
            return BlockMetaUpdate.REFUSED
        if not self.holds(block_id, expected, group_id):
            return BlockMetaUpdate.STALE
        self.free_queue.claim(self.blocks[block_id], claim)
        return BlockMetaUpdate.UPDATED

    def reuse_when_freed(
        self, block_ids: Sequence[BlockId], *, num_own_users: int
    ) -> None:
        for block_id in block_ids:
            block = self.blocks[block_id]
            if 0 < block.ref_cnt <= num_own_users:
                self.free_queue.reuse_when_freed([block])

    # --- for assertions ------------------------------------------------------

    def free_order(self) -> list[int]:
        return [block.block_id for block in self.free_queue.get_all_free_blocks()]

    def contents(self, blocks: Iterable[FakeBlock]) -> str:
        """The last letter of each block's content; ``_`` for a block without any.

        With the hashes of ``builders.chain`` that is the letter it stands for.
        """
        return "".join(
            chr(block.block_hash[0][-1]) if block.block_hash else "_"
            for block in blocks
        )

    def free_contents(self) -> str:
        """Contents of the free blocks in allocation order."""
        return self.contents(self.free_queue.get_all_free_blocks())

    def zone_contents(self) -> tuple[str, str, str]:
        """Contents of the free blocks by zone, in allocation order."""
        zones: tuple[list[FakeBlock], ...] = [], [], []
        for block in self.free_queue.get_all_free_blocks():
            claim = self.free_queue.claims[block.block_id]
            zones[0 if claim is None else claim.zone].append(block)
        a, b, c = (self.contents(zone) for zone in zones)
        return a, b, c

    def check_integrity(self) -> None:
        self.free_queue.check_integrity()
        free = set(self.free_order())
        for block in self.blocks[1:]:
            assert block.ref_cnt >= 0, block
            assert (block.ref_cnt == 0) == (block.block_id in free), block


def ids(blocks: Sequence[FakeBlock]) -> list[BlockId]:
    return [BlockId(block.block_id) for block in blocks]
