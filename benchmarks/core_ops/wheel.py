"""The timer wheel, with a plain dict of the same keys as what memory allows."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial

from benchmarks.core_ops.timing import Batch
from sam_connector.core.timer_wheel import TimerWheel

NUM_OPS = 5_000
NUM_IDLE_TICKS = 20
#: Deadlines are this far away, in seconds: none of them comes due by itself.
SOONEST_S, LATEST_S = 1_500.0, 3_600.0

#: What a lease costs from its start to its end.
LIFE = ("register", "refresh", "advance", "remove")


class Timer:
    """A key as small as a key can be."""

    __slots__ = ()


Deadline = tuple[Timer, float]


class WheelSubject:
    """Timers all over the wheel; those that are touched are picked at random.

    Args:
        num_entries: timers.
    """

    def __init__(self, num_entries: int) -> None:
        self._rng = random.Random(num_entries)
        self._now = 0.0
        self._wheel: TimerWheel[Timer] = TimerWheel(now=self._now)
        self._keys = [Timer() for _ in range(num_entries)]
        self._rng.shuffle(self._keys)
        self._floor: dict[Timer, float] = {}
        _register(self._wheel, self._far(self._keys))
        _store(self._floor, self._far(self._keys))

    def batches(self) -> Iterator[Batch]:
        num_ops = min(NUM_OPS, len(self._keys) // 2)
        picked = self._rng.sample(self._keys, num_ops)
        deadlines = self._far(picked)
        yield self._batch("refresh", picked, partial(_register, self._wheel, deadlines))
        yield self._batch("dict", picked, partial(_store, self._floor, deadlines))
        picked = self._rng.sample(self._keys, num_ops)
        yield self._batch("remove", picked, partial(_remove, self._wheel, picked))
        deadlines = self._far(picked)
        yield self._batch(
            "register", picked, partial(_register, self._wheel, deadlines)
        )
        _register(self._wheel, [(key, self._now + 0.5) for key in picked])
        yield self._batch("advance", picked, partial(self._tick, num_ops))
        _register(self._wheel, deadlines)
        yield Batch(name="idle_tick", num_ops=NUM_IDLE_TICKS, run=self._idle)

    def _far(self, keys: Iterable[Timer]) -> list[Deadline]:
        uniform, now = self._rng.uniform, self._now
        return [(key, now + uniform(SOONEST_S, LATEST_S)) for key in keys]

    def _batch(self, name: str, keys: list[Timer], run: partial[None]) -> Batch:
        return Batch(name=name, num_ops=len(keys), run=run)

    def _tick(self, num_due: int) -> None:
        self._now += 1.0
        expired = self._wheel.advance(self._now, limit=num_due + 1)
        if len(expired) != num_due:
            raise RuntimeError(f"{len(expired)} timers ended instead of {num_due}")

    def _idle(self) -> None:
        for _ in range(NUM_IDLE_TICKS):
            self._tick(0)


def _register(wheel: TimerWheel[Timer], deadlines: Iterable[Deadline]) -> None:
    register = wheel.register
    for key, expire_at in deadlines:
        register(key, expire_at)


def _remove(wheel: TimerWheel[Timer], keys: Iterable[Timer]) -> None:
    remove = wheel.remove
    for key in keys:
        remove(key)


def _store(floor: dict[Timer, float], deadlines: Iterable[Deadline]) -> None:
    for key, expire_at in deadlines:
        floor.pop(key, None)
        floor[key] = expire_at
