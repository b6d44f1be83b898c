"""One session with a very long context: its completion, its end, its expiry.

A request that completes a 4,096-block context has to cost about what its *new*
blocks cost, and ending the session must not stall the engine: whatever has to be
moved is moved a bounded number of blocks per step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.no_hint_overhead.mix import BLOCK_SIZE
from benchmarks.no_hint_overhead.timing import StepTimer, quiet_gc
from benchmarks.scheduler_harness import (
    VOCAB_SIZE,
    expected_output,
    make_request,
    make_scheduler,
)
from sam_connector.core.types import Edit, EditType, SessionKey

NUM_BLOCKS = 4_096
GROWTH_BLOCKS = 8
OUTPUT_TOKENS = 8
SESSION = "long"


class LongSession:
    """A scheduler that serves turn after turn of one growing context.

    Args:
        connector: the arm.
        hinted: whether requests carry a hint.
        num_turns: how far the context will grow.
    """

    def __init__(self, connector: str, *, hinted: bool, num_turns: int) -> None:
        num_blocks = NUM_BLOCKS + GROWTH_BLOCKS * (num_turns + 2) + 1_024
        self.scheduler = make_scheduler(
            connector,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE * 2,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE * 2,
        )
        self.timer = StepTimer(self.scheduler)
        self._hinted = hinted
        self._turn = 0
        self._rng = random.Random(0)
        # One block short of the size that is measured: the first turn fills it.
        self._tokens = self._new_tokens((NUM_BLOCKS - GROWTH_BLOCKS) * BLOCK_SIZE)

    def complete_turn(self, ttl_s: float = 60.0) -> int:
        """Serves one turn; returns the CPU nanoseconds of its last update."""
        request_id = f"turn-{self._turn}"
        self._turn += 1
        hint = {"session_id": SESSION, "cache_control": {"ttl": ttl_s}}
        request = make_request(
            request_id,
            self._tokens,
            max_tokens=OUTPUT_TOKENS,
            agent_hint=hint if self._hinted else None,
            block_size=BLOCK_SIZE,
        )
        answer = expected_output(request_id, len(self._tokens), OUTPUT_TOKENS)
        new = GROWTH_BLOCKS * BLOCK_SIZE - OUTPUT_TOKENS
        self._tokens = self._tokens + answer + self._new_tokens(new)
        self.scheduler.add_request(request)
        while self.scheduler.has_unfinished_requests():
            update_ns = self.timer.step()
        return update_ns

    def close(self) -> None:
        self.scheduler.shutdown()

    def _new_tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(VOCAB_SIZE), k=count)


def completion_pairs(num_pairs: int) -> tuple[list[float], list[float]]:
    """CPU nanoseconds of completing the same turns, ours with hints and stock."""
    stock = LongSession("null", hinted=False, num_turns=num_pairs)
    ours = LongSession("sam", hinted=True, num_turns=num_pairs)
    for session in (stock, ours):
        session.complete_turn()
    stock_ns: list[float] = []
    ours_ns: list[float] = []
    with quiet_gc():
        for pair in range(num_pairs):
            arms = [(stock, stock_ns), (ours, ours_ns)]
            for session, times_ns in arms if pair % 2 else reversed(arms):
                times_ns.append(float(session.complete_turn()))
    stock.close()
    ours.close()
    return ours_ns, stock_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstStep:
    """Largest CPU time of one scheduler step, in milliseconds.

    Attributes:
        evict_ms: while the session was evicted by a control call, that included.
        edit_ms: while it was evicted by the hint of a request that completed.
        expiry_ms: while its lease ran out.
        traffic_ms: the same traffic with nothing to do for the session.
    """

    evict_ms: float
    edit_ms: float
    expiry_ms: float
    traffic_ms: float

    @property
    def worst_ms(self) -> float:
        return max(self.evict_ms, self.edit_ms, self.expiry_ms)


def worst_steps(num_repeats: int = 3) -> WorstStep:
    """The best of ``num_repeats`` of each, since noise only ever adds."""

    def best(event: Callable[[LongSession], None], ttl_s: float = 60.0) -> float:
        return min(_worst_step(event, ttl_s) for _ in range(num_repeats))

    return WorstStep(
        evict_ms=best(_evict),
        edit_ms=best(_edit),
        expiry_ms=best(_expire, ttl_s=0.2),
        traffic_ms=best(_nothing),
    )


def _worst_step(event: Callable[[LongSession], None], ttl_s: float) -> float:
    session = LongSession("sam", hinted=True, num_turns=4)
    session.complete_turn(ttl_s)
    _add_traffic(session.scheduler, num_requests=16)
    for _ in range(4):
        session.timer.step()
    session.timer.step_ns.clear()
    with quiet_gc():
        event(session)
        for _ in range(60):
            session.timer.step()
    stats = _host(session.scheduler).manager.stats()
    if event is not _nothing and stats.protected_blocks:
        raise RuntimeError(f"the session's blocks were not given up: {stats}")
    session.close()
    return max(session.timer.step_ns) / 1e6


def _nothing(session: LongSession) -> None:
    pass


def _evict(session: LongSession) -> None:
    host = _host(session.scheduler)
    key = SessionKey("", SESSION)
    session.timer.call(lambda: host.apply_edits(key, [Edit(type=EditType.EVICT)]))


def _edit(session: LongSession) -> None:
    hint = {
        "session_id": SESSION,
        "context_management": {"edits": [{"type": "evict"}]},
    }
    request = make_request(
        "last", range(64), max_tokens=2, agent_hint=hint, block_size=BLOCK_SIZE
    )
    session.scheduler.add_request(request)


def _expire(session: LongSession) -> None:
    # The timer wheel turns once a second.
    time.sleep(1.5)


def _add_traffic(scheduler: Scheduler, *, num_requests: int) -> None:
    for index in range(num_requests):
        scheduler.add_request(
            make_request(
                f"traffic-{index}",
                range(index * 1_000, index * 1_000 + 200),
                max_tokens=200,
                block_size=BLOCK_SIZE,
            )
        )


def _host(scheduler: Scheduler) -> Any:
    connector: Any = scheduler.connector
    return connector.scheduler_side.host
