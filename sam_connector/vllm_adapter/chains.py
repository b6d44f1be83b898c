"""A request's blocks in the core's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sam_connector.core.contexts import Chain
from sam_connector.core.types import NULL_BLOCK_ID, BlockHash, BlockId, GroupId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class ChainReader:
    """Reads requests' block hashes and block tables, per KV cache group.

    Only groups that live in the main block pool and take part in prefix caching
    are read; a group with a pool of its own numbers its blocks differently. The
    first group read is one with full attention if there is any, since it has a
    block for every token.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        pool = kv_cache_manager.block_pool
        self._hash_block_size = pool.hash_block_size
        groups = [
            manager
            for manager in kv_cache_manager.coordinator.single_type_managers
            if manager.block_pool is pool and manager.kv_cache_spec.prefix_cacheable
        ]
        groups.sort(key=lambda m: not isinstance(m.kv_cache_spec, FullAttentionSpec))
        #: Tokens per block of each group, the group that sessions are matched by
        #: first.
        self.block_sizes: dict[GroupId, int] = {
            GroupId(manager.kv_cache_group_id): manager.block_size for manager in groups
        }

    @property
    def primary_block_size(self) -> int:
        """Tokens per logical block of a session's context."""
        return next(iter(self.block_sizes.values()), 0)

    def hashes(self, request: Request, group_id: GroupId) -> Sequence[BlockHash]:
        """Content of the request's full blocks in one group."""
        hashes = resolve_block_hashes(
            request.block_hashes, self._hash_block_size, self.block_sizes[group_id]
        )
        return cast("Sequence[BlockHash]", hashes)

    def assigned(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> dict[GroupId, Chain]:
        """All blocks in the request's tables, computed or about to be."""
        return self._chains(request, block_ids, num_tokens=None)

    def computed(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> dict[GroupId, Chain]:
        """The blocks whose content is beyond doubt.

        ``num_computed_tokens`` is optimistic while a step is in flight, and
        ``block_hashes`` covers sampled tokens that were never computed.
        """
        num_tokens = min(
            request.num_computed_tokens - request.num_in_flight_tokens,
            request.num_tokens,
        )
        return self._chains(request, block_ids, num_tokens=max(0, num_tokens))

    def _chains(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | None,
    ) -> dict[GroupId, Chain]:
        chains = {}
        for group_id, block_size in self.block_sizes.items():
            hashes = self.hashes(request, group_id)
            ids = block_ids[group_id] if group_id < len(block_ids) else ()
            limit = len(hashes)
            if num_tokens is not None:
                limit = min(limit, num_tokens // block_size)
            if limit < len(ids):
                ids = ids[:limit]
            chains[group_id] = Chain(
                hashes=hashes,
                block_ids=cast("Sequence[BlockId]", ids),
                num_passed=_num_leading_nulls(ids),
            )
        return chains


def _num_leading_nulls(block_ids: Sequence[int]) -> int:
    """Blocks that vLLM gave back because the attention window has passed them."""
    if not block_ids or block_ids[0] != NULL_BLOCK_ID:
        return 0
    return next(
        (i for i, b in enumerate(block_ids) if b != NULL_BLOCK_ID), len(block_ids)
    )
