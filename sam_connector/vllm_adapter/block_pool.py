"""vLLM's ``BlockPool`` behind the core's port."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.core.kv_cache_utils import BlockHash as VllmBlockHash
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from sam_connector.core.claim import Claim
from sam_connector.core.retention import BlockMetaUpdate
from sam_connector.core.types import BlockHash, BlockId, GroupId
from sam_connector.core.zoned_queue import ZonedFreeQueue

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


#: By whether the block holds what was expected.
_OUTCOMES = (BlockMetaUpdate.STALE, BlockMetaUpdate.UPDATED)


class BlockPoolAdapter:
    """Puts the zoned queue in place of ``free_block_queue`` and guards the blocks.

    Args:
        block_pool: vLLM's pool; its free list is taken over in its present order.
        enforce: see ``ZonedFreeQueue``.
    """

    def __init__(self, block_pool: BlockPool, *, enforce: bool = True) -> None:
        self._pool = block_pool
        self.blocks: list[KVCacheBlock] = block_pool.blocks
        # The free list, not ``blocks``: the null block has been taken out already.
        free = block_pool.free_block_queue.get_all_free_blocks()
        for block in free:
            block.prev_free_block = block.next_free_block = None
        self.free_queue = ZonedFreeQueue(
            free, block_pool.num_gpu_blocks, enforce=enforce
        )
        block_pool.free_block_queue = self.free_queue  # type: ignore[assignment]
        self._hash_map = block_pool.cached_block_hash_to_block

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold content: all but the null block."""
        return self._pool.num_gpu_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free_blocks

    def guard_callbacks(self, guarded: Callable[..., Any]) -> None:
        """Runs what allocation calls back under ``guarded(call, *args)``."""
        queue = self.free_queue
        queue.on_shortage = functools.partial(guarded, queue.on_shortage)
        queue.on_reassigned = functools.partial(guarded, queue.on_reassigned)

    def abandon(self) -> None:
        """Makes every block ordinary and forgets whoever was listening."""
        self.free_queue.detach()

    def take_reset(self) -> bool:
        """Whether the prefix cache was emptied since the last call.

        vLLM tells a connector of some resets only, but it replaces the pool's hash
        map on every one.
        """
        current = self._pool.cached_block_hash_to_block
        was_reset = current is not self._hash_map
        self._hash_map = current
        return was_reset

    def update_block_meta(
        self,
        *,
        block_ids: Sequence[BlockId],
        expected_block_hashes: Sequence[BlockHash],
        group_id: GroupId,
        claim: Claim,
    ) -> list[BlockMetaUpdate]:
        blocks, num_blocks, put = self.blocks, len(self.blocks), self.free_queue.claim
        group = make_block_hash_with_group_id(VllmBlockHash(b""), group_id)
        if block_ids and min(block_ids) > 0 and max(block_ids) < num_blocks:
            # The rule, and the hot path of a request: nothing to refuse.
            chosen = [blocks[block_id] for block_id in block_ids]
            held = [block.block_hash for block in chosen]
            if _is_all(held, expected_block_hashes, group):
                self.free_queue.claim_all(chosen, claim)
                return [BlockMetaUpdate.UPDATED] * len(chosen)
            expected_keys = [expected + group for expected in expected_block_hashes]
            are_equal = list(map(operator.eq, held, expected_keys))
            self.free_queue.claim_all(
                list(itertools.compress(chosen, are_equal)), claim
            )
            return list(map(_OUTCOMES.__getitem__, are_equal))
        updates = []
        for block_id, expected in zip(block_ids, expected_block_hashes, strict=True):
            if not 0 < block_id < num_blocks or blocks[block_id].is_null:
                updates.append(BlockMetaUpdate.REFUSED)
                continue
            block = blocks[block_id]
            if block.block_hash == expected + group:
                put(block, claim)
                updates.append(BlockMetaUpdate.UPDATED)
            else:
                updates.append(BlockMetaUpdate.STALE)
        return updates

    def reuse_when_freed(
        self, block_ids: Sequence[BlockId], *, num_own_users: int
    ) -> None:
        blocks = map(self.blocks.__getitem__, block_ids)
        self.free_queue.reuse_when_freed(
            [block for block in blocks if 0 < block.ref_cnt <= num_own_users]
        )


def _is_all(
    held: Sequence[bytes | None], expected: Sequence[bytes], group: bytes
) -> bool:
    """Whether every block holds what is expected of it, without an object for each.

    All hashes of a group have one length, so that what differs in a block differs in
    the bytes of all of them together.
    """
    try:
        found = b"".join(cast("Sequence[bytes]", held))
    except TypeError:  # a block that has no hash
        return False
    return found == group.join(expected) + group
