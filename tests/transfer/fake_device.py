"""Streams of a device that is not there: work waits in lists until it is looked at."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable

from sam_connector.transfer.contract import Direction
from sam_connector.transfer.copy_device import Mark
from sam_connector.transfer.layout import Descriptors


class FakeMark:
    """An event; asking for it lets some work of all streams happen first."""

    def __init__(self, device: FakeDevice) -> None:
        self.is_passed = False
        self._device = device

    def query(self) -> bool:
        self._device.work(3)
        return self.is_passed


class FakeDevice:
    """Runs the streams' work step by step, in an order of its own choice.

    It is as unkind as a GPU may be: work of different streams happens in a random
    order unless one waits for the other, and sources that were called stable are read
    at once. ``compute`` is the caller's current stream.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: dict[object, deque[Callable[[], bool]]] = {
            name: deque() for name in ("compute", *Direction)
        }

    def compute(self, work: Callable[[], object]) -> None:
        """A kernel on the current stream."""
        self._push("compute", lambda: (work(), True)[1])

    def mark_current(self) -> Mark:
        return self._mark("compute")

    def bind_thread(self) -> None:
        pass

    def wait(self, direction: Direction, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        self._push(direction, lambda: mark.is_passed)

    def copy(
        self, direction: Direction, descriptors: Descriptors, *, is_stable: bool
    ) -> None:
        sources, targets = descriptors.device.tolist(), descriptors.host.tolist()
        if direction is Direction.LOAD:
            sources, targets = targets, sources
        sizes = descriptors.sizes.tolist()
        for source, target, size in zip(sources, targets, sizes, strict=True):
            read_early = ctypes.string_at(source, size) if is_stable else None
            self._push(direction, _copy(source, target, size, read_early))

    def mark(self, direction: Direction) -> Mark:
        return self._mark(direction)

    def synchronize(self, direction: Direction) -> None:
        self._finish(direction)

    def finish_compute(self) -> None:
        self._finish("compute")

    def work(self, num_steps: int) -> None:
        """Up to so many steps of streams that do not have to wait."""
        with self._lock:
            for _ in range(num_steps):
                busy = [stream for stream in self._streams.values() if stream]
                if not busy:
                    return
                stream = self._rng.choice(busy)
                if stream[0]():
                    stream.popleft()

    def _finish(self, name: object) -> None:
        while True:
            with self._lock:
                if not self._streams[name]:
                    return
                self.work(8)

    def _mark(self, name: object) -> FakeMark:
        mark = FakeMark(self)

        def passed() -> bool:
            mark.is_passed = True
            return True

        with self._lock:
            self._push(name, passed)
        return mark

    def _push(self, name: object, step: Callable[[], bool]) -> None:
        with self._lock:
            self._streams[name].append(step)


def _copy(
    source: int, target: int, size: int, read_early: bytes | None
) -> Callable[[], bool]:
    def step() -> bool:
        ctypes.memmove(target, source if read_early is None else read_early, size)
        return True

    return step
