"""Small calls to a store, made by threads of ours so that the engine never waits."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable

from sam_connector.core.clock import Clock

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class CallThread:
    """One thread that makes calls at their time, and a regular one in between.

    Thread-safe. A call that raises is logged; the thread goes on.

    Args:
        name: of the thread.
        clock: where time comes from.
        tick_s: at least so often ``on_tick`` is called.
        on_tick: made from the thread.
    """

    def __init__(
        self, name: str, clock: Clock, *, tick_s: float, on_tick: Call
    ) -> None:
        self._clock = clock
        self._tick_s = tick_s
        self._on_tick = on_tick
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Call]] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Call, delay_s: float = 0.0) -> None:
        """Has ``call`` made as soon as possible, or later; not after ``close``."""
        with self._wake:
            due_at = self._clock.now() + delay_s if delay_s else 0.0
            heapq.heappush(self._calls, (due_at, next(self._order), call))
            self._wake.notify()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the call under way."""
        with self._wake:
            self._is_closed = True
            self._calls.clear()
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                call = self._next()
                if call is None and not self._is_closed:
                    self._wake.wait(self._tick_s)
                    call = self._next()
                if self._is_closed:
                    return
            try:
                if call is not None:
                    call()
                self._on_tick()
            except Exception:
                logger.exception("a call to the store went wrong")

    def _next(self) -> Call | None:
        if self._calls and self._calls[0][0] <= self._clock.now():
            return heapq.heappop(self._calls)[2]
        return None
