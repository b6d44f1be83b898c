"""vLLM's block pool with content that nothing has computed, behind our adapter."""

from __future__ import annotations

import random
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash as VllmBlockHash
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from sam_connector.core.types import BlockHash, BlockId, GroupId
from sam_connector.vllm_adapter.block_pool import BlockPoolAdapter

GROUP = GroupId(0)
HASH_BYTES = 32


class EnginePool:
    """A real pool; blocks get their hash as if a request had filled them.

    Args:
        num_blocks: that can hold content.
        seed: of the contents.
    """

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self._pool = BlockPool(
            num_gpu_blocks=num_blocks + 1, enable_caching=True, hash_block_size=16
        )
        self._rng = random.Random(seed)
        self.adapter = BlockPoolAdapter(self._pool)

    def new_hashes(self, count: int) -> list[BlockHash]:
        return [BlockHash(self._rng.randbytes(HASH_BYTES)) for _ in range(count)]

    def take(self, hashes: list[BlockHash]) -> list[BlockId]:
        """Blocks in use, with this content."""
        blocks = self._pool.get_new_blocks(len(hashes))
        for block, block_hash in zip(blocks, hashes, strict=True):
            block.set_block_hash(
                make_block_hash_with_group_id(VllmBlockHash(block_hash), GROUP)
            )
        return [BlockId(block.block_id) for block in blocks]

    def use(self, block_ids: list[BlockId]) -> None:
        """A request hits these blocks."""
        self._pool.touch(self._blocks(block_ids))

    def give_back(self, block_ids: list[BlockId]) -> None:
        """Their request has ended: the tail of the context first."""
        self._pool.free_blocks(reversed(self._blocks(block_ids)))

    def _blocks(self, block_ids: list[BlockId]) -> list[Any]:
        return [self._pool.blocks[block_id] for block_id in block_ids]
