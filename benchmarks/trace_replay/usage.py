"""How much of the block pool is in use or kept, over virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.trace_replay.policies import Policy

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class Level:
    """A share that changes at moments; its peak, and its mean over time."""

    def __init__(self) -> None:
        self.value = 0.0
        self.peak = 0.0
        self._area = 0.0

    def set(self, value: float) -> None:
        self.value = value
        self.peak = max(self.peak, value)

    def hold(self, seconds: float) -> None:
        """It was what it is for so long."""
        self._area += self.value * seconds

    def mean(self, seconds: float) -> float:
        return self._area / seconds if seconds else 0.0


class Usage:
    """Of one pool: blocks of running requests, and blocks in use or kept.

    What is kept is counted when a request ends, which is when it changes.
    """

    def __init__(self, manager: KVCacheManager, policy: Policy) -> None:
        self._manager = manager
        self._policy = policy
        self._num_blocks = manager.block_pool.num_gpu_blocks - 1
        self._now_s = 0.0
        self.in_use = Level()
        self.kept = Level()

    def advance(self, now_s: float) -> None:
        self.in_use.set(self._manager.usage)
        for level in (self.in_use, self.kept):
            level.hold(now_s - self._now_s)
        self._now_s = now_s

    def sample(self) -> None:
        self.kept.set(self._policy.num_kept() / self._num_blocks)
