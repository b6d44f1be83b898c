"""CPU time of the scheduler alone: the fake model's share is never on the clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from benchmarks.scheduler_harness import Batch, ConnectorWorker, complete, execute

NS_PER_S = 1e9


@dataclass(slots=True)
class StepTimer:
    """Drives a scheduler and sums the CPU time of its calls on this thread.

    Attributes:
        worker: stands in for the connector's worker role; off the clock.
        total_ns: all calls since the start.
        step_ns: per step, ``schedule`` and ``update_from_output`` together.
    """

    scheduler: Scheduler
    worker: ConnectorWorker | None = None
    total_ns: int = 0
    step_ns: list[int] = field(default_factory=list)

    def add(self, request: Request) -> None:
        start_ns = time.thread_time_ns()
        self.scheduler.add_request(request)
        self.total_ns += time.thread_time_ns() - start_ns

    def step(self) -> int:
        """One step with nothing left in flight; returns its update's CPU time."""
        start_ns = time.thread_time_ns()
        scheduler_output = self.scheduler.schedule()
        schedule_ns = time.thread_time_ns() - start_ns
        batch = Batch(
            scheduler_output, execute(self.scheduler, scheduler_output, self.worker)
        )
        start_ns = time.thread_time_ns()
        complete(self.scheduler, batch)
        update_ns = time.thread_time_ns() - start_ns
        self.step_ns.append(schedule_ns + update_ns)
        self.total_ns += schedule_ns + update_ns
        return update_ns

    def call(self, function: Callable[[], object]) -> None:
        """Counts ``function`` as a step of its own: a control call between steps."""
        start_ns = time.thread_time_ns()
        function()
        elapsed_ns = time.thread_time_ns() - start_ns
        self.step_ns.append(elapsed_ns)
        self.total_ns += elapsed_ns


@contextmanager
def quiet_gc() -> Iterator[None]:
    """Keeps collections out of the timings; vLLM freezes its heap likewise."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of paired measurements: the median ratio, and how far the pairs scatter."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        ratios = [n / d for n, d in zip(numerators, denominators, strict=True)]
        deciles = statistics.quantiles(ratios, n=10)
        return cls(median=statistics.median(ratios), low=deciles[0], high=deciles[-1])
