from __future__ import annotations

import pytest

from benchmarks.transfer_bandwidth.timing import (
    Side,
    Times,
    bandwidth_ratio,
    in_turns,
    slowdown,
)


def test_sides_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []
    sides = {
        name: Side(lambda name=name: order.append(name), num_bytes)  # type: ignore[misc]
        for name, num_bytes in (("a", 10), ("b", 20))
    }
    times = in_turns(sides, 3)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(each.seconds) for name, each in times.items()} == {"a": 3, "b": 3}
    assert {name: each.num_bytes for name, each in times.items()} == {"a": 10, "b": 20}


def test_rates_are_of_the_median() -> None:
    assert Times(4_000_000_000, [1.0, 2.0, 100.0]).gb_per_s == 2.0


def test_a_ratio_is_the_median_over_rounds() -> None:
    """The last round was disturbed on both sides, and does not show."""
    ours, other = Times(100, [1.0, 2.0, 90.0]), Times(100, [0.5, 1.0, 45.0])
    assert bandwidth_ratio(ours, other) == 0.5
    assert bandwidth_ratio(other, ours) == 2.0


def test_sides_that_move_less_are_judged_by_their_rate() -> None:
    """A quarter of the bytes in half of the time: half the bandwidth."""
    assert bandwidth_ratio(Times(400, [2.0]), Times(100, [1.0])) == 2.0


@pytest.mark.parametrize(
    ("alone", "beside", "expected"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.02, 5.0], 0.02),
        ([2.0, 4.0], [2.0, 4.0], 0.0),
        ([1.0], [0.5], -0.5),
    ],
)
def test_slowdown_is_of_pairs(
    alone: list[float], beside: list[float], expected: float
) -> None:
    assert slowdown(alone, beside) == pytest.approx(expected)
