"""Jobs of all ranks: one has ended once every rank has said that it is done."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class _Job(Protocol):
    ranks: set[int]


class _Result(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def job_id(self) -> int: ...


J = TypeVar("J", bound=_Job)
R = TypeVar("R", bound=_Result)


class RankTally(Generic[J]):
    """Counts ranks by their number, not reports: a rank may repeat itself.

    Args:
        num_ranks: that report each job.

    Attributes:
        num_ranks: as given.
        jobs: those that some rank is not done with.
        num_late: reports of jobs that are not known, or of a rank that was done.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._ids = itertools.count(1)
        self.jobs: dict[int, J] = {}
        self.num_late = 0

    def new_id(self) -> int:
        return next(self._ids)

    def report(self, results: Iterable[R], merge: Callable[[J, R], None]) -> list[J]:
        """Takes what ranks report; returns jobs that all of them are done with.

        Args:
            results: of any jobs, in any order.
            merge: adds a rank's result to its job.
        """
        ended = []
        for result in sorted(results, key=_by_job):
            job = self.jobs.get(result.job_id)
            if job is None or result.rank in job.ranks:
                self.num_late += 1
                continue
            job.ranks.add(result.rank)
            merge(job, result)
            if len(job.ranks) == self.num_ranks:
                del self.jobs[result.job_id]
                ended.append(job)
        return ended


def _by_job(result: _Result) -> tuple[int, int]:
    return result.job_id, result.rank
