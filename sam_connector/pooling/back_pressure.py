"""How much may be on its way to and from a store at a time."""

from __future__ import annotations

#: What is left of the window after a batch that took too long, and after one that
#: failed.
_SLOW_FACTOR = 0.8
_FAILURE_FACTOR = 0.5

#: Where it starts, in multiples of the smallest window: a store of unknown speed.
_START_FACTOR = 4


class InflightWindow:
    """A window of bytes that grows slowly while a store keeps up, and shrinks fast.

    Args:
        min_bytes: it never gets smaller, so that work always goes on; also what it
            grows by at a time.
        max_bytes: it never gets larger.
        target_s: a batch that takes longer tells that the store is behind.

    Attributes:
        limit_bytes: the window.
    """

    def __init__(self, *, min_bytes: int, max_bytes: int, target_s: float) -> None:
        if not 0 < min_bytes <= max_bytes:
            raise ValueError(f"a window of {min_bytes} to {max_bytes} bytes")
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._target_s = target_s
        self.limit_bytes = min(max_bytes, min_bytes * _START_FACTOR)

    def on_success(self, latency_s: float) -> None:
        """A batch is done; slow ones narrow the window."""
        if latency_s > self._target_s:
            self._shrink(_SLOW_FACTOR)
        else:
            self.limit_bytes = min(self._max_bytes, self.limit_bytes + self._min_bytes)

    def on_failure(self) -> None:
        """A batch has failed, for want of an answer or with a bad one."""
        self._shrink(_FAILURE_FACTOR)

    def _shrink(self, factor: float) -> None:
        self.limit_bytes = max(self._min_bytes, int(self.limit_bytes * factor))
