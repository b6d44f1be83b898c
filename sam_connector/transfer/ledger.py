"""Which jobs are in flight and which have ended; every job ends exactly once."""

from __future__ import annotations

import threading

from sam_connector.transfer.contract import JobResult

#: What becomes of a job that a closed engine is given, or has not begun.
CLOSED = "the copy engine is closed"


class JobLedger:
    """Counts jobs in and results out. Any thread may call anything."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_open = 0
        self._results: list[JobResult] = []

    @property
    def num_open(self) -> int:
        return self._num_open

    def begin(self) -> None:
        with self._changed:
            self._num_open += 1

    def end(self, job_id: int, error: str | None = None) -> None:
        """Reports a job that ``begin`` was called for."""
        with self._changed:
            assert self._num_open > 0, f"job {job_id} ended and never began"
            self._num_open -= 1
            self._results.append(JobResult(job_id, error))
            self._changed.notify_all()

    def take_results(self) -> list[JobResult]:
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait_until_none_open(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, timeout_s)


def describe(error: BaseException) -> str:
    """What a result says of an exception: never empty."""
    return f"{type(error).__name__}: {error}"
