from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from benchmarks.core_ops import timing
from benchmarks.core_ops.timing import Batch, growth, measure_costs

pytestmark = pytest.mark.vllm


class FakeSubject:
    """Counts what it is asked for; an operation takes as long as the subject says."""

    clock_ns = 0

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
        self.num_rounds = 0

    def batches(self) -> Iterator[Batch]:
        self.num_rounds += 1
        FakeSubject.clock_ns += 1_000_000  # preparing is not on the clock
        yield Batch(name="slow", num_ops=10, run=lambda: self._work(10))
        yield Batch(name="fast", num_ops=10, run=lambda: self._work(1))

    def _work(self, factor: int) -> None:
        # The first round of a turn is the one off the clock.
        is_warm = self.num_rounds % 2 == 0
        FakeSubject.clock_ns += 10 * factor * self.num_entries * (1 if is_warm else 99)


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "thread_time_ns", lambda: FakeSubject.clock_ns)


def test_costs_are_per_operation_of_warm_rounds() -> None:
    costs = measure_costs(FakeSubject, [10, 40], num_rounds=3)
    assert costs == {
        10: {"slow": 100.0, "fast": 10.0},
        40: {"slow": 400.0, "fast": 40.0},
    }


def test_growth_is_from_the_smallest_size_to_the_largest() -> None:
    costs = {
        10: {"a": 1.0, "b": 9.0},
        20: {"a": 5.0, "b": 5.0},
        40: {"a": 3.0, "b": 9.0},
    }
    assert growth(costs) == pytest.approx(1.2)
    assert growth(costs, ["a"]) == 3.0
