"""Makes an idle engine take a step when the store has something for it.

An engine without requests sleeps. It must not be kept stepping while a store is at
work, since that costs half a core and holds up a pause; so it is woken for single
steps, by a message of the kind that vLLM itself wakes it with.
"""

from __future__ import annotations

import threading
from typing import Any

#: Between two wakings while ranks are at work for nobody in particular.
_INTERVAL_S = 0.01


class EngineWaker:
    """Wakes one engine. ``wake`` may be called from any thread."""

    def __init__(self) -> None:
        self._engine: Any = None
        #: A step is wanted.
        self.is_due = False
        self._is_busy = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_attached(self) -> bool:
        """Whether the engine is known; it is after the first control call."""
        return self._engine is not None

    @property
    def is_paused(self) -> bool:
        """Whether the engine sleeps or is paused: nothing of its may be moved."""
        return self._engine is not None and bool(self._engine.is_sleeping())

    def attach(self, engine: Any) -> None:
        """The engine, of which only a control call gets hold."""
        if self._engine is None and hasattr(engine, "input_queue"):
            self._engine = engine

    def wake(self) -> None:
        """Has the engine take a step soon."""
        self.is_due = True
        engine = self._engine
        if engine is not None:
            from vllm.v1.engine import EngineCoreRequestType

            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def set_busy(self, is_busy: bool) -> None:
        """Whether ranks are at work, whose reports only a step collects."""
        if not is_busy:
            self._is_busy.clear()
        elif not self._is_busy.is_set():
            self._is_busy.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="sam-waker", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._is_busy.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._is_busy.wait()
            pause.wait(_INTERVAL_S)
            if self._is_closed:
                return
            # One waking at a time: a step that is under way will see to it.
            if not self.is_due:
                self.wake()
