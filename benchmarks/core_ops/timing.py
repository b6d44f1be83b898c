"""CPU time of one operation, at several numbers of entries by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.no_hint_overhead.timing import quiet_gc


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Operations of one kind, prepared so that only they are on the clock.

    Attributes:
        name: of the kind.
        num_ops: how many ``run`` carries out.
        run: to be called once.
    """

    name: str
    num_ops: int
    run: Callable[[], object]


class Subject(Protocol):
    """A structure that holds a number of entries before and after each round."""

    def batches(self) -> Iterator[Batch]:
        """One round: each batch is prepared when the one before has been run."""
        ...


#: Nanoseconds per operation, by number of entries and kind.
Costs = dict[int, dict[str, float]]


def measure_costs(
    make: Callable[[int], Subject], sizes: Sequence[int], num_rounds: int
) -> Costs:
    """Medians over the rounds; the sizes take turns.

    Each turn begins with a round off the clock: otherwise a small structure would
    pay for the caches that a large one has just emptied, and seem as slow.
    """
    times_ns: dict[int, dict[str, list[float]]] = {size: {} for size in sizes}
    with quiet_gc():
        subjects = {size: make(size) for size in sizes}
        for _ in range(num_rounds):
            for size, subject in subjects.items():
                for batch in subject.batches():
                    batch.run()
                for batch in subject.batches():
                    found = times_ns[size].setdefault(batch.name, [])
                    found.append(cpu_ns(batch.run) / batch.num_ops)
    return {
        size: {name: statistics.median(found) for name, found in kinds.items()}
        for size, kinds in times_ns.items()
    }


def growth(costs: Costs, names: Sequence[str] | None = None) -> float:
    """The cost of one of each of ``names`` at the largest size over the smallest."""

    def total(size: int) -> float:
        kinds = costs[size]
        return sum(kinds[name] for name in (kinds if names is None else names))

    return total(max(costs)) / total(min(costs))


def cpu_ns(run: Callable[[], object]) -> int:
    """CPU time that this thread spends in ``run``."""
    start_ns = time.thread_time_ns()
    run()
    return time.thread_time_ns() - start_ns
