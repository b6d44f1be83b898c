"""Copies under way, and how many ranks are done with each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sam_connector.connector.metadata import (
    EMPTY_METADATA,
    RankResult,
    SAMConnectorMetadata,
    StoreJob,
)
from sam_connector.connector.tier.rank_tally import RankTally
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.types import GroupId, SessionKey
from sam_connector.transfer.contract import CopyJob, Direction, GroupCopy


class Copy(NamedTuple):
    """One block to copy between the engine and a slot.

    ``block_index`` is its position in the sequence, for blocks to be published.
    """

    content: Content
    block: Any
    slot: Slot
    block_index: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """Copies that start, end and fail together on every rank.

    Attributes:
        copies: what is copied, first blocks of a sequence first. None at all means
            that the job fails.
        generation: of the tier's content when the job started.
        request_id: the request that waits for it, if it loads for one.
        deadline: until when other requests wait for it.
        owner: the operation that started it; none for what the save policy stores.
        waiters: operations that it works for, with the number of its blocks each is
            about.
        contexts: contexts that hold what it stores.
        is_demotion: its blocks were free, in the order in which they will be taken.
        ranks: which are done.
        error: the first failure of any rank.
    """

    job_id: int
    direction: Direction
    copies: Sequence[Copy]
    generation: int
    request_id: str | None = None
    deadline: float = 0.0
    owner: Any = None
    waiters: dict[Any, int] = field(default_factory=dict)
    contexts: set[tuple[SessionKey, int]] = field(default_factory=set)
    is_demotion: bool = False
    ranks: set[int] = field(default_factory=set)
    error: str | None = None

    @property
    def contents(self) -> list[Content]:
        return [copy.content for copy in self.copies]

    @property
    def blocks(self) -> list[Any]:
        return [copy.block for copy in self.copies]

    @property
    def slots(self) -> list[Slot]:
        return [copy.slot for copy in self.copies]


class JobTable:
    """Jobs from their start until every rank has said that it is done.

    Args:
        num_ranks: ranks that copy (tensor times pipeline parallel).

    Attributes:
        storing: the job that copies a content to the tier.
        loading: the job that copies a content to the engine. Not those of a request
            that already runs on what was loaded.
        num_blocks: blocks of the engine that jobs hold; those of a request that waits
            for its load are the request's.
    """

    def __init__(self, num_ranks: int) -> None:
        self._tally: RankTally[Job] = RankTally(num_ranks)
        self._new: list[Job] = []
        self.storing: dict[Content, Job] = {}
        self.loading: dict[Content, Job] = {}
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._tally.jobs)

    def start(self, direction: Direction, copies: Sequence[Copy], **more: Any) -> Job:
        """Opens a job; it reaches the ranks with the next step's metadata."""
        job = Job(
            job_id=self._tally.new_id(), direction=direction, copies=copies, **more
        )
        self._tally.jobs[job.job_id] = job
        self._new.append(job)
        if job.request_id is None:
            self.num_blocks += len(job.copies)
        by_content = self._by_content(direction)
        for copy in copies:
            by_content.setdefault(copy.content, job)
        return job

    @property
    def has_new(self) -> bool:
        """Whether there are jobs that the ranks have not heard of."""
        return bool(self._new)

    def take_metadata(
        self, store_jobs: tuple[StoreJob, ...] = ()
    ) -> SAMConnectorMetadata:
        """What the ranks are to start now, these jobs with the store included."""
        if not self._new and not store_jobs:
            return EMPTY_METADATA
        jobs, self._new = self._new, []
        return SAMConnectorMetadata(
            jobs=tuple(map(_to_wire, jobs)),
            request_ids={
                job.job_id: job.request_id for job in jobs if job.request_id is not None
            },
            store_jobs=store_jobs,
        )

    @property
    def num_ranks(self) -> int:
        return self._tally.num_ranks

    @property
    def num_late(self) -> int:
        """Reports of jobs that are not known."""
        return self._tally.num_late

    def report(self, results: Iterable[RankResult]) -> list[Job]:
        """Counts what ranks report; returns jobs that all of them are done with."""
        ended = self._tally.report(results, _merge)
        for job in ended:
            self._close(job)
        return ended

    def _close(self, job: Job) -> None:
        if job.request_id is None:
            self.num_blocks -= len(job.copies)
        by_content = self._by_content(job.direction)
        for copy in job.copies:
            if by_content.get(copy.content) is job:
                del by_content[copy.content]

    def _by_content(self, direction: Direction) -> dict[Content, Job]:
        return self.storing if direction is Direction.STORE else self.loading

    def open_jobs(self) -> Mapping[int, Job]:
        return self._tally.jobs


def _merge(job: Job, result: RankResult) -> None:
    if result.error is not None and job.error is None:
        job.error = f"rank {result.rank}: {result.error}"


def _to_wire(job: Job) -> CopyJob:
    if not job.copies:
        # Every rank refuses a group that nobody has.
        refused = GroupCopy(group_id=-1, block_ids=(), slots=())
        return CopyJob(job_id=job.job_id, direction=job.direction, parts=(refused,))
    groups: dict[GroupId, tuple[list[int], list[int]]] = {}
    for (group_id, _), block, slot, _ in job.copies:
        group = groups.get(group_id)
        if group is None:
            group = groups[group_id] = ([], [])
        group[0].append(block.block_id)
        group[1].append(slot.index)
    return CopyJob(
        job_id=job.job_id,
        direction=job.direction,
        parts=tuple(
            GroupCopy(group_id=group_id, block_ids=block_ids, slots=slots)
            for group_id, (block_ids, slots) in groups.items()
        ),
    )
