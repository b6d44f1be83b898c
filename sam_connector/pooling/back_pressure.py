"""How many bytes may be on their way to a store that is as fast as it just was."""

from __future__ import annotations


class InflightWindow:
    """Grows while the store is quick, shrinks when it is slow or fails.

    Additive increase and multiplicative decrease, as TCP does it.

    Args:
        min_bytes: never less, so that recovery is noticed.
        max_bytes: never more.
        target_s: a job that takes longer than this has waited in a queue.
    """

    def __init__(self, *, min_bytes: int, max_bytes: int, target_s: float) -> None:
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._target_s = target_s
        self.limit_bytes = max_bytes

    def on_success(self, latency_s: float) -> None:
        if latency_s > self._target_s:
            self._shrink()
        else:
            step = max(1, self._max_bytes // 16)
            self.limit_bytes = min(self._max_bytes, self.limit_bytes + step)

    def on_failure(self) -> None:
        self._shrink()

    def _shrink(self) -> None:
        self.limit_bytes = max(self._min_bytes, self.limit_bytes // 2)
