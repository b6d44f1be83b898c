"""Offload and prefetch: what clients ask for, carried out step by step.

An operation works through its blocks in the order of the sequence, as far as the
budget for copies allows in each step, so that a large one neither holds the whole
pool nor keeps others waiting. It ends once nothing of it is left or under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from sam_connector.connector.tier.jobs import Job
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus, SessionKey


class ContextBlock(NamedTuple):
    """A block of a context: its content, and its position in the sequence."""

    content: Content
    block_index: int


def subject_of(
    kind: type[Operation], session: SessionKey, contexts: Sequence[ContextBlocks]
) -> Hashable:
    """The same for two operations that do the same to the same blocks."""
    ranges = (
        (c.context_id, c.block_start, *map(len, c.block_hashes.values()))
        for c in contexts
    )
    return kind, session, tuple(ranges)


class Operation(ABC):
    """One offload or prefetch under way.

    Attributes:
        operation_ids: the clients' handles; asked for twice it is done once.
        session: whose.
        context_ids: of its contexts.
        subject: see ``subject_of``.
        num_requested: blocks it is about.
        num_pending: blocks that jobs work on.
        slots: what it has pinned in the tier.
        has_ended: nothing more will come of it.
    """

    def __init__(
        self,
        state: TierState,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        self._state = state
        self.operation_ids: list[str] = []
        self.session = session
        self.context_ids = [context.context_id for context in contexts]
        self.num_pending = 0
        self.has_ended = False
        self.slots: list[Slot] = []
        self._reason: str | None = None
        self.num_requested = 0
        self._num_done = 0
        self._num_already = 0
        self._num_bytes = 0
        self.subject = subject_of(type(self), session, contexts)

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Whether there is anything to do that no copy under way is about."""

    @property
    def waits_for_store(self) -> bool:
        """Whether only an answer of the store can bring it forward.

        Steps need not go on for it: the store's answer makes for one.
        """
        return False

    @abstractmethod
    def advance(self, budget: int, max_looks: int) -> int:
        """Starts more copies.

        Args:
            budget: most blocks to copy.
            max_looks: most blocks to look at, whatever becomes of them.

        Returns:
            How many it has looked at.
        """

    @abstractmethod
    def on_copied(self, job: Job, num_blocks: int) -> None:
        """A job is done with so many blocks of the operation, or has failed."""

    def end(self) -> OperationHandle:
        """Nothing is left to do; gives back what is held and says how it went."""
        self.has_ended = True
        self._let_go()
        num_had = self._num_done + self._num_already
        if self.num_requested and not num_had:
            status = EditStatus.REJECTED
        elif num_had < self.num_requested:
            status = EditStatus.PARTIAL
        else:
            status = EditStatus.COMPLETED
        return OperationHandle(
            status=status,
            blocks=BlockCounts(
                requested=self.num_requested,
                done=self._num_done,
                already=self._num_already,
                missing=max(0, self.num_requested - num_had),
            ),
            num_bytes=self._num_bytes,
            reason=self._explanation(status),
            is_safe=self._is_safe(),
        )

    @property
    def pinned_slots(self) -> list[Slot]:
        """What it has pinned in the tier."""
        return self.slots

    def cancel(self, reason: str) -> OperationHandle:
        """What is under way comes to nothing."""
        self._reason = reason
        handle = self.end()
        return OperationHandle(
            status=EditStatus.REJECTED, blocks=handle.blocks, reason=reason
        )

    def let_go_of_pins(self) -> None:
        """Gives back the slots and blocks that the operation itself has pinned."""
        slots, self.slots = self.slots, []
        self._state.slots.unpin(slots[::-1])

    def _explanation(self, status: EditStatus) -> str | None:
        if status is EditStatus.COMPLETED:
            return None
        return self._reason or "some blocks are in no cache any more"

    def _is_safe(self) -> bool:
        return False

    @abstractmethod
    def _let_go(self) -> None:
        """Gives back what the operation itself holds."""

    def _count(self, job: Job, num_blocks: int) -> bool:
        """Adds what a job has done for the operation; whether it did."""
        if job.error is not None or job.generation != self._state.generation:
            self._reason = job.error or "the cache was reset"
            return False
        if job.owner is self:
            self._num_done += num_blocks
            self._num_bytes += self._state.num_bytes(job.copies)
        else:
            self._num_already += num_blocks
        return True

    def _wait_for(self, job: Job, num_blocks: int = 1) -> None:
        job.waiters[self] = job.waiters.get(self, 0) + num_blocks
        self.num_pending += num_blocks


def blocks_of(
    contexts: Sequence[ContextBlocks], only: int | None = None
) -> Iterator[ContextBlock]:
    """The blocks of contexts, each context in the order of its sequence."""
    for context in contexts:
        for group_id, hashes in context.block_hashes.items():
            if only is None or group_id == only:
                for index, block_hash in enumerate(hashes, context.block_start):
                    yield ContextBlock((group_id, block_hash), index)
