"""What differs between the arms of a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from benchmarks.trace_replay.workload import Turn, Workload


class Policy:
    """Stock vLLM, and the hooks by which another arm departs from it.

    ``attach`` runs once before anything else; ``advance`` before each event, with a
    time that never decreases; the others in this order, and admission again after a
    preemption.
    """

    name = "lru"

    def attach(self, manager: KVCacheManager, workload: Workload) -> None:
        """Takes hold of a fresh cache manager."""

    def advance(self, now_s: float) -> None:
        """Virtual time moved on."""

    def on_arrival(self, turn: Turn, request: Request) -> None:
        """The request reached the server; it may wait for room."""

    def on_admitted(self, turn: Turn, request: Request, num_cached: int) -> None:
        """Its blocks were just assigned."""

    def on_preempted(self, turn: Turn, request: Request) -> None:
        """It lost its blocks while running and waits again."""

    def before_free(self, turn: Turn, request: Request) -> None:
        """It ended; its blocks are still its own."""

    def after_free(self, turn: Turn, request: Request) -> None:
        """Its blocks are back in the pool."""

    def num_leases_broken(self) -> int:
        """Contexts that lost blocks while under a live deadline."""
        return 0
