"""The engine's prefix cache as a memory tier uses it: find, pin, take, publish.

Every method runs on the scheduler's thread. Blocks are taken or given back only
between scheduling steps or while a step's metadata is built, never while the
scheduler looks a request up: its local hits are not referenced yet at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash as VllmBlockHash
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)

from sam_connector.core.slot_pool import Content
from sam_connector.core.types import (
    NULL_BLOCK_ID,
    BlockHash,
    BlockId,
    GroupId,
    SessionKey,
)
from sam_connector.core.zoned_queue import ZonedFreeQueue

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class GpuCache:
    """vLLM's ``BlockPool``, through the few calls that a tier needs.

    Args:
        block_pool: vLLM's pool.
        block_sizes: tokens per block of each KV cache group.
        reserve: share of the pool that ``take`` leaves free.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        block_sizes: dict[GroupId, int],
        *,
        reserve: float = 0.0,
    ) -> None:
        self._pool = block_pool
        self._block_sizes = block_sizes
        self._reserve = int(block_pool.num_gpu_blocks * reserve)
        #: References of ours on blocks.
        self.num_pins = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_gpu_blocks - 1

    def find(self, content: Content) -> KVCacheBlock | None:
        """The block that holds ``content``, computed or about to be."""
        # Looked up anew each time: a reset replaces the map.
        return self._pool.cached_block_hash_to_block.get_one_block(_key(content))

    def find_id(self, group_id: GroupId, block_hash: BlockHash) -> BlockId:
        block = self.find((group_id, block_hash))
        return NULL_BLOCK_ID if block is None else BlockId(block.block_id)

    def block(self, block_id: int) -> KVCacheBlock:
        return self._pool.blocks[block_id]

    def holds(self, block: KVCacheBlock, content: Content) -> bool:
        return block.block_hash == _key(content)

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keeps blocks from being reused; must be undone by ``unpin``."""
        self._pool.touch(blocks)
        self.num_pins += len(blocks)

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Undoes one ``pin`` or ``take`` each; the last block is given up first."""
        self._pool.free_blocks(reversed(blocks))
        self.num_pins -= len(blocks)

    def put_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Undoes one ``pin`` each of free blocks: they were not used.

        Their place in the free list is what it was, first of ``blocks`` first.
        """
        queue = self._pool.free_block_queue
        assert isinstance(queue, ZonedFreeQueue)
        with queue.putting_back():
            self._pool.free_blocks(blocks)
        self.num_pins -= len(blocks)

    def num_takeable(self, limit: int) -> int:
        """Blocks that can be taken, at most ``limit``.

        The reserve stays free, and what a lease protects stays where it is.
        """
        queue = self._pool.free_block_queue
        room = min(limit, queue.num_free_blocks - self._reserve)
        if isinstance(queue, ZonedFreeQueue):
            room = min(room, queue.num_unleased(max(0, room)))
        return max(0, room)

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks to write into, pinned; their old content is gone."""
        blocks = self._pool.get_new_blocks(num_blocks)
        self.num_pins += num_blocks
        return blocks

    def publish(self, block: KVCacheBlock, content: Content, block_index: int) -> None:
        """A block of ours holds ``content`` now, and requests may hit it.

        Args:
            block: taken before, without content.
            content: what has been written into it.
            block_index: its position in the sequence, which says how many tokens
                its hash covers.
        """
        num_tokens = (block_index + 1) * self._block_sizes[content[0]]
        self._pool._insert_block_hash(_key(content), block, num_tokens=num_tokens)

    def forget(self, content: Content) -> None:
        """Nobody finds ``content`` any more, unless it is in use or a session's."""
        while (block := self.find(content)) is not None:
            if block.ref_cnt or self.contexts_of(block):
                return
            self._pool.evict_blocks({block.block_id})

    @property
    def num_unclaimed(self) -> int:
        """Free blocks that no session holds."""
        queue = self._pool.free_block_queue
        if isinstance(queue, ZonedFreeQueue):
            return queue.num_unclaimed
        return queue.num_free_blocks

    @property
    def num_taken(self) -> int:
        """Blocks handed out so far, where sessions can hold any."""
        queue = self._pool.free_block_queue
        return queue.num_taken if isinstance(queue, ZonedFreeQueue) else 0

    def retained(self) -> Iterator[KVCacheBlock]:
        """Free blocks that sessions hold, next to be lost first."""
        queue = self._pool.free_block_queue
        return queue.retained() if isinstance(queue, ZonedFreeQueue) else iter(())

    def contexts_of(self, block: KVCacheBlock) -> Iterable[tuple[SessionKey, int]]:
        """Session and id of every context that holds the block."""
        queue = self._pool.free_block_queue
        if not isinstance(queue, ZonedFreeQueue):
            return ()
        claim = queue.claims[block.block_id]
        if claim is None or claim.owner is None:
            return ()
        return [(c.session.key, c.context_id) for c in claim.owner.deadlines]

    def content_of(self, block: KVCacheBlock) -> Content | None:
        """What a block holds; ``None`` if that has no name or is not a whole block."""
        key = block.block_hash
        if key is None:
            return None
        group_id = GroupId(get_group_id(key))
        num_tokens = block.block_hash_num_tokens
        if num_tokens is not None and num_tokens % self._block_sizes[group_id]:
            return None
        return group_id, BlockHash(bytes(get_block_hash(key)))


def _key(content: Content) -> BlockHashWithGroupId:
    """The content as vLLM's prefix cache names it."""
    group_id, block_hash = content
    return make_block_hash_with_group_id(VllmBlockHash(block_hash), group_id)
