"""Copies that finish when a test says so: late, out of order, or not at all."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from sam_connector.transfer.contract import CopyEngine, CopyJob, GroupCopy, JobResult

CopyAt = Literal["submit", "release", "either"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePlan:
    """How the gates of all ranks behave from the start.

    Attributes:
        hold: jobs end only when released.
        copy_at: when the bytes of a held or delayed job move. ``submit`` shows what
            relies on bytes before their job is reported, ``release`` what was
            reused or read too early; ``either`` draws.
        max_delay: a job may take up to this many polls longer than it needs.
        shuffle: jobs that are due at the same poll are reported in any order.
        fail: numbers of jobs that fail, by rank, counted from 0 as submitted.
        failure_rate: share of other jobs that fail.
        seed: of everything that is drawn.
    """

    hold: bool = False
    copy_at: CopyAt = "release"
    max_delay: int = 0
    shuffle: bool = False
    fail: Mapping[int, Collection[int]] = field(default_factory=dict)
    failure_rate: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class _Waiting:
    job: CopyJob
    polls_left: int
    is_held: bool
    error: str | None
    result: JobResult | None = None


class CopyGate(CopyEngine):
    """A copy engine in front of another one.

    It keeps the other's promises: jobs that share a slot or a block move their bytes
    in the order of their submission, whatever the order they are reported in. The
    inner engine's copy is awaited where it happens, so that a run is the same every
    time. A job that is to fail copies the first half of its blocks, rounded up.

    Args:
        engine: does the copying.
        rank: whose.
        plan: how it behaves.

    Attributes:
        history: all jobs, in the order of their submission.
    """

    def __init__(self, engine: CopyEngine, rank: int, plan: GatePlan) -> None:
        self.engine = engine
        self.plan = plan
        self.is_holding = plan.hold
        self.history: list[CopyJob] = []
        self._fail = set(plan.fail.get(rank, ()))
        self._rng = random.Random(plan.seed * 1_009 + rank)
        self._waiting: list[_Waiting] = []
        self._ended: list[JobResult] = []

    # --- what a connector calls -------------------------------------------------------

    @override
    def submit(self, job: CopyJob) -> None:
        waiting = _Waiting(
            job,
            polls_left=self._rng.randint(0, self.plan.max_delay),
            is_held=self.is_holding,
            error=self._error(len(self.history)),
        )
        self.history.append(job)
        self._waiting.append(waiting)
        copy_at = self.plan.copy_at
        if copy_at == "either":
            copy_at = self._rng.choice(("submit", "release"))
        if copy_at == "submit":
            self._copy(waiting)

    @override
    def poll(self) -> list[JobResult]:
        due = [w for w in self._waiting if not w.is_held and w.polls_left <= 0]
        for waiting in self._waiting:
            waiting.polls_left -= 1
        self._end(due)
        ended, self._ended = self._ended, []
        if self.plan.shuffle:
            self._rng.shuffle(ended)
        return ended

    @override
    def drain(self, timeout_s: float | None = None) -> bool:
        if timeout_s is not None:
            return not self._waiting  # what is held or delayed outlasts any limit
        self._end(list(self._waiting))
        return True

    @property
    @override
    def num_in_flight(self) -> int:
        return len(self._waiting)

    @override
    def close(self) -> None:
        self.engine.close()
        for waiting in self._waiting:
            result = waiting.result or JobResult(waiting.job.job_id, "closed")
            self._ended.append(result)
        self._waiting.clear()

    # --- what a test calls ------------------------------------------------------------

    @property
    def held(self) -> list[CopyJob]:
        """Jobs that wait for their release, oldest first."""
        return [w.job for w in self._waiting if w.is_held]

    def hold(self) -> None:
        """Jobs submitted from now on wait for their release."""
        self.is_holding = True

    def release(self, job_id: int | None = None, *, error: str | None = None) -> int:
        """Ends one held job, or all; they are reported at the next poll.

        Args:
            job_id: which; ``None`` for all that are held.
            error: makes them fail.

        Returns:
            How many were released.
        """
        released = [
            w
            for w in self._waiting
            if w.is_held and (job_id is None or w.job.job_id == job_id)
        ]
        for waiting in released:
            waiting.error = error or waiting.error
        self._end(released)
        return len(released)

    def open(self) -> None:
        """Holds nothing any longer, now or later."""
        self.is_holding = False
        self.release()

    def copy_now(self, job: CopyJob) -> None:
        """Copies for the test itself; the connector hears nothing of it."""
        assert self._run(job).error is None

    def fail_next(self, count: int = 1) -> None:
        """The next jobs to be submitted fail."""
        first = len(self.history)
        self._fail |= set(range(first, first + count))

    # --- internals --------------------------------------------------------------------

    def _error(self, number: int) -> str | None:
        drawn = self._rng.random() < self.plan.failure_rate
        return "failed on purpose" if drawn or number in self._fail else None

    def _end(self, ending: Collection[_Waiting]) -> None:
        for waiting in ending:
            self._copy(waiting)
            result = waiting.result
            assert result is not None
            if waiting.error is not None:
                result = dataclasses.replace(result, error=waiting.error)
            self._ended.append(result)
        self._waiting = [w for w in self._waiting if w not in ending]

    def _copy(self, waiting: _Waiting) -> None:
        if waiting.result is not None:
            return
        for earlier in self._waiting[: self._waiting.index(waiting)]:
            if _places(earlier.job) & _places(waiting.job):
                self._copy(earlier)
        job = waiting.job if waiting.error is None else _first_half(waiting.job)
        waiting.result = self._run(job)

    def _run(self, job: CopyJob) -> JobResult:
        self.engine.submit(job)
        assert self.engine.drain()
        (result,) = self.engine.poll()
        return result


def _places(job: CopyJob) -> set[tuple[str, int]]:
    slots = {("slot", slot) for part in job.parts for slot in part.slots}
    return slots | {("block", block) for part in job.parts for block in part.block_ids}


def _first_half(job: CopyJob) -> CopyJob:
    def half(part: GroupCopy) -> GroupCopy:
        count = (len(part.block_ids) + 1) // 2
        return GroupCopy(part.group_id, part.block_ids[:count], part.slots[:count])

    return dataclasses.replace(job, parts=tuple(map(half, job.parts)))
