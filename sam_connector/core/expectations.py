"""When those who hold a segment expect to be back, and who is first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Mapping
from typing import Any


class Expectations:
    """Moments of any number of holders; the earliest is known at once.

    A prefix that thousands of sessions share loses the earliest of its moments each
    time that one of them comes back, so a search among all would be quadratic. A
    change costs O(log holders), on average over many.

    Args:
        moments: to begin with.
    """

    __slots__ = ("_heap", "_moments", "_numbers")

    def __init__(self, moments: Mapping[Any, float] | None = None) -> None:
        self._moments: dict[Hashable, float] = dict(moments or {})
        self._numbers = itertools.count()
        #: Every moment, and some that do not hold any more.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._rebuild()

    def __len__(self) -> int:
        return len(self._moments)

    @property
    def moments(self) -> Mapping[Any, float]:
        """By holder."""
        return self._moments

    @property
    def earliest(self) -> float:
        """The earliest moment, 0 if there is none."""
        heap, moments = self._heap, self._moments
        while heap and moments.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else 0.0

    def set(self, holder: Hashable, moment: float) -> None:
        """The holder expects to be back at ``moment``; 0 for no expectation."""
        if self._moments.get(holder, 0.0) == moment:
            return
        if not moment:
            del self._moments[holder]
        else:
            self._moments[holder] = moment
            heapq.heappush(self._heap, (moment, next(self._numbers), holder))
        if len(self._heap) > 2 * len(self._moments) + 8:
            self._rebuild()

    def copy(self) -> Expectations:
        return Expectations(self._moments)

    def _rebuild(self) -> None:
        self._heap = [
            (moment, next(self._numbers), holder)
            for holder, moment in self._moments.items()
        ]
        heapq.heapify(self._heap)
