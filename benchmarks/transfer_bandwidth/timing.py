"""Sides that take turns, and what is said about their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do something: ``run`` moves ``num_bytes`` and waits for the end."""

    run: Callable[[], None]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one side's runs, in the order of the rounds."""

    num_bytes: int
    seconds: list[float]

    @property
    def gb_per_s(self) -> float:
        return round(self.num_bytes / statistics.median(self.seconds) / 1e9, 2)


def in_turns(sides: Mapping[str, Side], repeats: int) -> dict[str, Times]:
    """Runs all sides, every other round in the opposite order; one round to warm up."""
    times = {name: Times(side.num_bytes, []) for name, side in sides.items()}
    for repeat in range(repeats + 1):
        for name in sorted(sides, reverse=repeat % 2 == 1):
            start = time.perf_counter()
            sides[name].run()
            if repeat:
                times[name].seconds.append(time.perf_counter() - start)
    return times


def bandwidth_ratio(ours: Times, other: Times) -> float:
    """The median over the rounds of our bandwidth over the other's in that round."""
    scale = ours.num_bytes / other.num_bytes
    return _median_of_pairs(other.seconds, ours.seconds, scale)


def slowdown(alone_s: Sequence[float], beside_s: Sequence[float]) -> float:
    """By what share something took longer beside something else; pairs by round."""
    return round(_median_of_pairs(beside_s, alone_s, 1.0) - 1.0, 4)


def _median_of_pairs(
    above: Sequence[float], below: Sequence[float], scale: float
) -> float:
    ratios = [scale * a / b for a, b in zip(above, below, strict=True)]
    return round(statistics.median(ratios), 4)
