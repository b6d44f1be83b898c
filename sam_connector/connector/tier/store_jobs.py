"""Transfers between slots and the store, from their request to the last rank's word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sam_connector.connector.metadata import (
    StoreDirection,
    StoreJob,
    StoreResult,
    StoreValue,
)
from sam_connector.connector.tier.rank_tally import RankTally
from sam_connector.connector.tier.session_directory import SessionDirectory
from sam_connector.connector.tier.values import Value
from sam_connector.core.clock import Clock
from sam_connector.core.slot_pool import Content, Slot, SlotPool
from sam_connector.core.types import GroupId


class SlotSide(Protocol):
    """What the store's part of the tier needs of the rest; ``TierState`` has it."""

    slots: SlotPool
    clock: Clock
    block_bytes: Mapping[GroupId, int]
    directory: SessionDirectory
    generation: int


class TransferEnd(NamedTuple):
    """What became of a transfer; ``reason`` says why it did not succeed."""

    value: Value
    is_done: bool
    reason: str | None


Waiter = Callable[[TransferEnd], None]


@dataclass(eq=False, slots=True)
class StoreTransfer:
    """One value on its way.

    Attributes:
        waiters: told once, when it has ended; its slots are still pinned then.
        slots: of its blocks, once under way; ``None`` for a block that is there
            already and only thrown away.
        is_purged: it is to be deleted once it is written.
    """

    direction: StoreDirection
    value: Value
    waiters: list[Waiter] = field(default_factory=list)
    slots: list[Slot | None] = field(default_factory=list)
    is_purged: bool = False

    @property
    def key(self) -> tuple[StoreDirection, Content]:
        return self.direction, self.value.chunk

    @property
    def pinned(self) -> list[Slot]:
        return [slot for slot in self.slots if slot is not None]

    def end(self, reason: str | None = None) -> None:
        """Tells whoever waits; no reason means success."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter(TransferEnd(self.value, reason is None, reason))


@dataclass(eq=False, slots=True, kw_only=True)
class RunningJob:
    """Transfers that the ranks carry out together.

    Attributes:
        generation: of the tier's content when it started.
        started_at: monotonic seconds.
        num_bytes: all ranks together.
        failed: positions of transfers that some rank could not do.
        missing: those of them that the store has not.
    """

    transfers: Sequence[StoreTransfer]
    generation: int
    started_at: float
    num_bytes: int
    ranks: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    error: str | None = None


class StoreJobTable:
    """Jobs from their start until every rank has said that it is done.

    Args:
        num_ranks: ranks that read and write.

    Attributes:
        num_bytes: under way.
    """

    def __init__(self, num_ranks: int) -> None:
        self._tally: RankTally[RunningJob] = RankTally(num_ranks)
        self._new: list[StoreJob] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._tally.jobs)

    def start(
        self,
        job: RunningJob,
        *,
        urgency: int,
        fingerprint: str,
        tenant: str,
        num_parts: int,
    ) -> None:
        """Opens a job; it reaches the ranks with the next step's metadata."""
        job_id = self._tally.new_id()
        self._tally.jobs[job_id] = job
        self.num_bytes += job.num_bytes
        self._new.append(
            StoreJob(
                job_id=job_id,
                direction=job.transfers[0].direction,
                urgency=urgency,
                fingerprint=fingerprint,
                tenant=tenant,
                num_parts=num_parts,
                values=tuple(map(_to_wire, job.transfers)),
            )
        )

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def take_new(self) -> tuple[StoreJob, ...]:
        """What the ranks are to start now."""
        new, self._new = self._new, []
        return tuple(new)

    @property
    def num_late(self) -> int:
        """Reports of jobs that are not known."""
        return self._tally.num_late

    def report(self, results: Iterable[StoreResult]) -> list[RunningJob]:
        """Counts what ranks report; returns jobs that all of them are done with."""
        ended = self._tally.report(results, _merge)
        self.num_bytes -= sum(job.num_bytes for job in ended)
        return ended

    def running(self) -> Iterable[RunningJob]:
        return self._tally.jobs.values()


def _merge(job: RunningJob, result: StoreResult) -> None:
    job.failed |= result.failed
    job.missing |= result.missing
    if result.error is not None and job.error is None:
        job.error = result.error


def _to_wire(transfer: StoreTransfer) -> StoreValue:
    group_id, block_hash = transfer.value.chunk
    return StoreValue(
        group_id=int(group_id),
        block_hash=bytes(block_hash),
        slots=tuple(-1 if s is None else s.index for s in transfer.slots),
    )
