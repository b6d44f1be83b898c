"""Offload and prefetch: what clients ask for, carried out step by step.

An operation works through its blocks in the order of the sequence, as far as the
budget for copies allows in each step, so that a large one neither holds the whole
pool nor keeps others waiting. It ends once nothing of it is left or under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from sam_connector.connector.tier.jobs import Copy, Job
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus, SessionKey
from sam_connector.transfer.contract import Direction

#: How long an offload waits for a slot while copies for others hold some.
_MAX_STALL_S = 2.0


class _Block(NamedTuple):
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
        """Whether there are blocks that nothing works on yet."""

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

    def cancel(self) -> OperationHandle:
        """The session was evicted; what is under way comes to nothing."""
        self._reason = "cancelled by evict"
        handle = self.end()
        return OperationHandle(
            status=EditStatus.REJECTED, blocks=handle.blocks, reason=self._reason
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


class Offload(Operation):
    """Copies what the engine has of a session to the tier.

    What it counts as done stays pinned in the tier until it ends: in a small tier
    the last of its blocks would otherwise displace the first.
    """

    def __init__(
        self,
        state: TierState,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        super().__init__(state, session, contexts)
        # Contexts of one session share a prefix; it is copied once.
        self._todo = deque(dict.fromkeys(block.content for block in _blocks(contexts)))
        self.num_requested = len(self._todo)
        self._awaited: set[Content] = set()
        #: What is in each of ``slots``.
        self._held: list[Content] = []
        self._num_lost = 0
        self._stalled_since: float | None = None

    @property
    @override
    def has_more(self) -> bool:
        return bool(self._todo)

    @override
    def advance(self, budget: int, max_looks: int) -> int:
        state = self._state
        sources: list[tuple[Content, Any]] = []
        present: list[Content] = []
        num_looks = 0
        while self._todo and len(sources) < budget and num_looks < max_looks:
            num_looks += 1
            content = self._todo.popleft()
            if content in state.slots:
                present.append(content)
            elif content in state.jobs.storing:
                self._wait_for(state.jobs.storing[content])
                self._awaited.add(content)
            elif (block := state.gpu.find(content)) is not None:
                sources.append((content, block))
        self._num_already += len(present)
        self._pin(present)
        if sources:
            self._store(sources)
        return num_looks

    def _store(self, sources: list[tuple[Content, Any]]) -> None:
        state = self._state
        owners = {(self.session, context_id) for context_id in self.context_ids}
        job = state.store(sources, contexts=owners, owner=self)
        num_stored = 0 if job is None else len(job.copies)
        if job is not None:
            self._wait_for(job, num_stored)
            self._awaited.update(job.contents)
            self._stalled_since = None
        elif self._has_stalled():
            self._num_lost += len(sources) + len(self._todo)
            self._reason = "the host tier is full of leased contexts"
            self._todo.clear()
            return
        # For lack of slots; copies under way may give some back.
        self._todo.extendleft(content for content, _ in reversed(sources[num_stored:]))

    @override
    def on_copied(self, job: Job, num_blocks: int) -> None:
        self.num_pending -= num_blocks
        if not self._count(job, num_blocks):
            self._num_lost += num_blocks
            return
        self._pin([content for content in job.contents if content in self._awaited])

    @override
    def end(self) -> OperationHandle:
        held = zip(self.slots, self._held, strict=True)
        num_gone = sum(slot.content != content for slot, content in held)
        if num_gone:
            # A reset, or a load that found a slot unreadable.
            self._num_lost += num_gone
            self._reason = self._reason or "a copy in the tier was lost"
            self._num_already -= num_gone
            self._num_done += min(0, self._num_already)
            self._num_already = max(0, self._num_already)
        return super().end()

    def _has_stalled(self) -> bool:
        """Whether there is no slot to be had, and none to be expected soon."""
        now = self._state.clock.now()
        if self._stalled_since is None:
            self._stalled_since = now
        return not len(self._state.jobs) or now - self._stalled_since > _MAX_STALL_S

    def _pin(self, contents: Sequence[Content]) -> None:
        """Keeps contents in the tier until the operation ends."""
        for content in contents:
            slot = self._state.slots.get(content)
            if slot is not None:
                self.slots.append(slot)
                self._held.append(content)
                self._state.slots.pin([slot])

    @override
    def _is_safe(self) -> bool:
        return self._num_lost == 0

    @override
    def _let_go(self) -> None:
        self._todo.clear()
        if not self._num_lost:
            owners = [(self.session, context_id) for context_id in self.context_ids]
            self._state.keep(owners)
        self.let_go_of_pins()


class Prefetch(Operation):
    """Brings a session back into the engine's prefix cache.

    What is there already is pinned first: taking blocks for the rest might
    otherwise displace the very prefix that the rest continues.
    """

    def __init__(
        self,
        state: TierState,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        super().__init__(state, session, contexts)
        self._chains = deque(
            deque(_blocks([context], only=group_id))
            for context in contexts
            for group_id in context.block_hashes
        )
        self.num_requested = sum(map(len, self._chains))
        #: The engine's blocks of the context, in the order of the sequence.
        self._pins: list[Any] = []
        self._is_cancelled = False

    @property
    @override
    def has_more(self) -> bool:
        return any(self._chains)

    @override
    def advance(self, budget: int, max_looks: int) -> int:
        # One sequence after the other, so that the next finds a shared prefix on its
        # way already.
        num_looks = 0
        while self._chains and budget > 0 and num_looks < max_looks:
            chain = self._chains[0]
            num_left = len(chain)
            copies = self._advance_chain(chain, budget, max_looks - num_looks)
            num_looks += num_left - len(chain)
            if not chain:
                self._chains.popleft()
            if copies:
                self._load(copies)
            budget -= len(copies)
        return num_looks

    @override
    def on_copied(self, job: Job, num_blocks: int) -> None:
        self.num_pending -= num_blocks
        self._count(job, num_blocks)

    def hold(self, blocks: Sequence[Any]) -> None:
        """Pins blocks of the context until the operation ends."""
        self._state.gpu.pin(blocks)
        self._pins.extend(blocks)

    @override
    def cancel(self) -> OperationHandle:
        self._is_cancelled = True
        return super().cancel()

    @override
    def _let_go(self) -> None:
        self._chains.clear()
        if not self._is_cancelled:
            for context_id in self.context_ids:
                self._state.directory.restore(
                    self.session, context_id, self._state.gpu.find_id
                )
        self.let_go_of_pins()

    @override
    def let_go_of_pins(self) -> None:
        super().let_go_of_pins()
        pins, self._pins = self._pins, []
        self._state.gpu.unpin(pins)

    def _advance_chain(
        self, chain: deque[_Block], budget: int, max_looks: int
    ) -> list[tuple[_Block, Slot]]:
        """Goes on with one sequence, up to the first block that is nowhere.

        Returns:
            What to load, and where it is.
        """
        state = self._state
        copies: list[tuple[_Block, Slot]] = []
        present: list[Any] = []
        while chain and len(copies) < budget and max_looks > 0:
            max_looks -= 1
            content = chain[0].content
            if (block := state.gpu.find(content)) is not None:
                present.append(block)
            elif content in state.jobs.loading:
                self._wait_for(state.jobs.loading[content])
            elif (slot := state.slots.get(content)) is not None:
                copies.append((chain[0], slot))
            else:
                chain.clear()  # without it, what follows is no prefix
                break
            chain.popleft()
        self._num_already += len(present)
        self.hold(present)
        return copies

    def _load(self, wanted: list[tuple[_Block, Slot]]) -> None:
        state = self._state
        num_blocks = state.gpu.num_takeable(len(wanted))
        if num_blocks < len(wanted):
            self._reason = "no room in the engine's cache beyond the reserve"
            self._chains.clear()
            wanted = wanted[:num_blocks]
        if not wanted:
            return
        slots = [slot for _, slot in wanted]
        state.slots.pin(slots)
        blocks = state.gpu.take(num_blocks)
        job = state.jobs.start(
            Direction.LOAD,
            [
                Copy(block.content, taken, slot, block.block_index)
                for (block, slot), taken in zip(wanted, blocks, strict=True)
            ],
            generation=state.generation,
            deadline=state.clock.now() + state.config.max_load_wait_s,
            owner=self,
        )
        self._wait_for(job, num_blocks)


def _blocks(
    contexts: Sequence[ContextBlocks], only: int | None = None
) -> Iterator[_Block]:
    """The blocks of contexts, each context in the order of its sequence."""
    for context in contexts:
        for group_id, hashes in context.block_hashes.items():
            if only is None or group_id == only:
                for index, block_hash in enumerate(hashes, context.block_start):
                    yield _Block((group_id, block_hash), index)
