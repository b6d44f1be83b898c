"""Where ``now`` comes from; the only place that may read a clock for the core."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic seconds, comparable within one process only."""

    def now(self) -> float: ...


class MonotonicClock:
    """The operating system's monotonic clock; immune to wall-clock jumps."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock for tests and simulations that moves only when told to.

    Args:
        start: first value of ``now()`` in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def set(self, now: float) -> None:
        """Jumps to ``now``; raises ``ValueError`` on an attempt to go back."""
        if now < self._now:
            raise ValueError(f"monotonic clock cannot go from {self._now} to {now}")
        self._now = now

    def advance(self, seconds: float) -> None:
        self.set(self._now + seconds)
