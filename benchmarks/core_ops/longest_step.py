"""The longest that the scheduler waits for the core, in a pool of long contexts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.core_ops.engine_pool import GROUP, EnginePool
from benchmarks.core_ops.timing import cpu_ns
from benchmarks.no_hint_overhead.timing import quiet_gc
from sam_connector.core.contexts import Chain, Chains
from sam_connector.core.limits import Limits
from sam_connector.core.manager import SessionAwareManager
from sam_connector.core.types import (
    BlockHash,
    BlockId,
    Edit,
    EditStatus,
    EditType,
    SessionHint,
    SessionKey,
)

CONTEXT_BLOCKS = 4_096
TTL_S = 60.0
NUM_REPEATS = 5


@dataclass(slots=True, kw_only=True)
class _Agent:
    key: SessionKey
    hashes: list[BlockHash]
    block_ids: list[BlockId]

    @property
    def chains(self) -> Chains:
        return {GROUP: Chain(hashes=self.hashes, block_ids=self.block_ids)}


class LongContexts:
    """A pool that is full of contexts of 4,096 blocks, all under one lease or other.

    Args:
        num_blocks: of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pool = EnginePool(num_blocks)
        self.manager = SessionAwareManager(
            self._pool.adapter,
            num_blocks=num_blocks + 1,
            limits=Limits(max_protected_fraction=1.0),
            now=0.0,
        )
        self._now = 0.0
        self._agents = iter(
            [self._agent(number) for number in range(num_blocks // CONTEXT_BLOCKS)]
        )
        self._left: list[_Agent] = []

    def events(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What happens to a context, the last one to all that are left at once."""
        for _ in range(NUM_REPEATS):
            agent = next(self._agents)
            self._serve(agent, ttl_s=1.0)
            self._now += 2.0
            yield "expiry", self._tick
            yield "release", lambda key=agent.key: self._free(key)
        for _ in range(NUM_REPEATS):
            agent = next(self._agents)
            self._serve(agent, ttl_s=TTL_S)
            yield "evict", lambda key=agent.key: self._evict(key)
        for _ in range(NUM_REPEATS):
            agent = next(self._agents)
            self._serve(agent, ttl_s=TTL_S)
            self._begin(agent, ttl_s=TTL_S)
            yield "evict_running", lambda key=agent.key: self._evict(key)
            self._end(agent)
        for agent in self._agents:
            self._serve(agent, ttl_s=TTL_S)
        for _ in range(NUM_REPEATS):
            self._now += 1.0
            yield "idle_tick", self._tick
        self._now += 2.0 * TTL_S
        yield "expiry_of_all", self._tick
        # A step ends so many leases and leaves the rest to the next.
        while self.manager.stats().protected_blocks:
            self._tick()

    def _agent(self, number: int) -> _Agent:
        hashes = self._pool.new_hashes(CONTEXT_BLOCKS)
        return _Agent(key=SessionKey("", f"{number}"), hashes=hashes, block_ids=[])

    def _serve(self, agent: _Agent, *, ttl_s: float) -> None:
        self._begin(agent, ttl_s=ttl_s)
        self._end(agent)

    def _begin(self, agent: _Agent, *, ttl_s: float) -> None:
        if agent.block_ids:
            self._pool.use(agent.block_ids)
        else:
            agent.block_ids = self._pool.take(agent.hashes)
        hint = SessionHint(session=agent.key, ttl_s=ttl_s)
        self.manager.on_request_added(agent.key.session_id, hint)
        self.manager.on_blocks_assigned(agent.key.session_id, agent.chains, self._now)

    def _end(self, agent: _Agent) -> None:
        self.manager.on_request_finished(
            agent.key.session_id, agent.chains, self._now, aborted=False
        )
        self._pool.give_back(agent.block_ids)

    def _tick(self) -> None:
        self.manager.advance(self._now)

    def _evict(self, key: SessionKey) -> None:
        results = self.manager.apply_edits(key, [Edit(type=EditType.EVICT)], self._now)
        if results[0].status is not EditStatus.COMPLETED:
            raise RuntimeError(f"not evicted: {results[0]}")

    def _free(self, key: SessionKey) -> None:
        if self.manager.free_session(key) != 1:
            raise RuntimeError(f"{key} was not known")


def longest_steps(num_blocks: int) -> dict[str, float]:
    """Microseconds of each kind of step, medians over the contexts it befell."""
    times_us: dict[str, list[float]] = {}
    with quiet_gc():
        contexts = LongContexts(num_blocks)
        for name, run in contexts.events():
            times_us.setdefault(name, []).append(cpu_ns(run) / 1e3)
    stats = contexts.manager.stats()
    if stats.protected_blocks:
        raise RuntimeError(f"leases have not ended: {stats}")
    return {name: statistics.median(found) for name, found in times_us.items()}
