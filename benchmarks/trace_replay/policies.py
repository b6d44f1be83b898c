"""What differs between the arms of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from benchmarks.trace_replay.workload import Turn, Workload
    from sam_connector.transfer.contract import Direction


class CopyOrder(NamedTuple):
    """Blocks to copy over the link.

    ``request_id`` is the request that waits for it; ``num_blocks`` is zero where the
    copy cannot be done.
    """

    job_id: int
    direction: Direction
    num_blocks: int
    request_id: str | None
    is_prefetch: bool


class Policy:
    """Stock vLLM, and the hooks by which another arm departs from it.

    ``attach`` runs once before anything else; ``advance`` before each event, with a
    time that never decreases. Of a request: ``on_ready``, ``on_arrival``, ``look_up``
    any number of times, ``on_blocks_assigned`` (twice if it loads; again after a
    preemption), ``before_free``, ``on_answer``.
    """

    name = "lru"

    #: Loads take no time and no part of the link.
    loads_are_free = False

    def attach(
        self, manager: KVCacheManager, kv_cache_config: KVCacheConfig, plan: Workload
    ) -> None:
        """Takes hold of a fresh cache manager."""
        self._pool = manager.block_pool

    def advance(self, now_s: float) -> None:
        """Virtual time moved on."""

    def on_ready(self, turn: Turn) -> None:
        """All that the turn waits for has ended; its own pause comes next."""

    def on_arrival(self, turn: Turn, request: Request) -> None:
        """The request reached the server; it may wait for room."""

    def look_up(self, request: Request, num_local: int) -> int | None:
        """Tokens beyond the local hit that a host tier has; ``None``: ask again."""
        return 0

    def on_blocks_assigned(
        self, turn: Turn, request: Request, blocks: KVCacheBlocks, num_external: int
    ) -> None:
        """Blocks were just assigned, the last of them to be loaded into."""

    def on_admitted(self, turn: Turn, request: Request, num_cached: int) -> None:
        """The request runs: all its blocks are assigned."""

    @property
    def is_due(self) -> bool:
        """Whether another step is needed though nothing is computed."""
        return False

    def on_step(self) -> Sequence[CopyOrder]:
        """Copies to start now."""
        return ()

    def on_copied(self, job_id: int, *, failed: bool) -> None:
        """A copy has ended."""

    def before_free(self, turn: Turn, request: Request) -> None:
        """It ended; its blocks are still its own."""

    def on_answer(self, turn: Turn) -> None:
        """Its blocks are back in the pool, and the agent has the answer."""

    def num_kept(self) -> int:
        """Blocks that are in use or kept because a request may want them."""
        return sum(
            block.ref_cnt > 0 or block.block_hash is not None
            for block in self._pool.blocks
            if not block.is_null
        )

    def num_prefetched_blocks_used(self) -> int:
        """Blocks that a prefetch brought and a request has hit."""
        return 0

    def counts(self) -> Mapping[str, int]:
        """What the arm itself has counted."""
        return {}
