"""Prefetch: a session's blocks are brought back into the engine's prefix cache."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from sam_connector.connector.tier.jobs import Copy, Job
from sam_connector.connector.tier.operations import ContextBlock, Operation, blocks_of
from sam_connector.connector.tier.state import TierState
from sam_connector.connector.tier.store_jobs import TransferEnd
from sam_connector.connector.tier.values import Value
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import SessionKey
from sam_connector.pooling.transfer_queue import Priority
from sam_connector.transfer.contract import Direction

#: Values that a prefetch has on their way from the store at a time: when the first
#: turns out not to be there, few others were asked for in vain.
_MAX_READS = 64


class Prefetch(Operation):
    """Brings a session back into the engine's prefix cache.

    What is there already is pinned first: taking blocks for the rest might
    otherwise displace the very prefix that the rest continues. What the tier lacks is
    read from the store, a little ahead of its turn.
    """

    def __init__(
        self,
        state: TierState,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        super().__init__(state, session, contexts)
        self._chains: deque[_Chain] = deque()
        #: The engine's blocks of the context, in the order of the sequence.
        self._pins: list[Any] = []
        #: Slots kept for a load to come.
        self._kept: dict[Content, Slot] = {}
        self._num_reading = 0
        #: The next block is on its way from the store; copies may be under way too.
        self._is_blocked = False
        self._is_stalled = False
        self._is_cancelled = False
        self._add(contexts)

    @property
    @override
    def has_more(self) -> bool:
        return any(chain.blocks for chain in self._chains)

    @property
    @override
    def waits_for_store(self) -> bool:
        return self._is_stalled and not self.num_pending

    @property
    @override
    def pinned_slots(self) -> list[Slot]:
        return list(self._kept.values())

    @override
    def advance(self, budget: int, max_looks: int) -> int:
        # One sequence after the other, so that the next finds a shared prefix on its
        # way already.
        num_looks = self._read_ahead(max_looks)
        self._is_blocked = False
        while self._chains and budget > 0 and num_looks < max_looks:
            chain = self._chains[0]
            num_left = len(chain.blocks)
            copies = self._advance_chain(chain, budget, max_looks - num_looks)
            num_looks += num_left - len(chain.blocks)
            if not chain.blocks:
                self._chains.popleft()
            if copies:
                self._load(copies)
            budget -= len(copies)
            if self._is_blocked:
                break
        self._is_stalled = self._is_blocked and self._num_reading > 0
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
    def cancel(self, reason: str) -> OperationHandle:
        self._is_cancelled = True
        return super().cancel(reason)

    def _add(self, contexts: Sequence[ContextBlocks]) -> None:
        """More to bring back."""
        store = self._state.remote
        for context in contexts:
            for group_id, hashes in context.block_hashes.items():
                chain = _Chain(deque(blocks_of([context], only=group_id)))
                if store is not None:
                    chain.unread.extend(
                        store.shape.values(group_id, hashes, context.block_start)
                    )
                self._chains.append(chain)
                self.num_requested += len(chain.blocks)

    @override
    def _let_go(self) -> None:
        self._chains.clear()
        if not self._is_cancelled:
            self._restore()
        self.let_go_of_pins()

    def _restore(self) -> None:
        """The manager learns what of its contexts is back."""
        for context_id in self.context_ids:
            self._state.directory.restore(
                self.session, context_id, self._state.gpu.find_id
            )

    @override
    def let_go_of_pins(self) -> None:
        slots, self._kept = self._kept, {}
        self._state.slots.unpin(list(slots.values())[::-1])
        pins, self._pins = self._pins, []
        self._state.gpu.unpin(pins)

    # --- from the store -------------------------------------------------------------

    def _read_ahead(self, max_looks: int) -> int:
        """Asks the store for what comes next and is nowhere else."""
        num_looks = 0
        for chain in self._chains:
            while chain.unread:
                if num_looks >= max_looks or self._num_reading >= _MAX_READS:
                    return num_looks
                value = chain.unread.popleft()
                num_looks += len(value.hashes)
                if not self._is_here(value):
                    self._read(chain, value)
        return num_looks

    def _is_here(self, value: Value) -> bool:
        """Whether no block of it is missing; keeps the slots of those in the tier."""
        state = self._state
        is_here = True
        for content in value.contents:
            if state.gpu.find(content) or content in state.jobs.loading:
                continue
            self._keep([content])
            is_here &= content in self._kept
        return is_here

    def _read(self, chain: _Chain, value: Value) -> None:
        assert self._state.remote is not None
        reason = self._state.remote.read(
            value,
            priority=Priority.PREFETCH,
            session=self.session,
            waiter=functools.partial(self._on_read, chain),
        )
        if reason is None:
            self._num_reading += 1
        else:
            self._reason = reason
            chain.unread.clear()

    def _on_read(self, chain: _Chain, end: TransferEnd) -> None:
        self._num_reading -= 1
        self._is_stalled = False
        if self.has_ended:
            return
        if end.is_done:
            self._keep(end.value.contents)
        else:
            self._reason = end.reason
            chain.unread.clear()  # what follows is no prefix

    def _keep(self, contents: Sequence[Content]) -> None:
        for content in contents:
            slot = self._state.slots.get(content)
            if slot is not None and content not in self._kept:
                self._kept[content] = slot
                self._state.slots.pin([slot])

    # --- to the engine --------------------------------------------------------------

    def _advance_chain(
        self, chain: _Chain, budget: int, max_looks: int
    ) -> list[tuple[ContextBlock, Slot]]:
        """Goes on with one sequence, up to the first block that is nowhere.

        Returns:
            What to load, and where it is.
        """
        state = self._state
        copies: list[tuple[ContextBlock, Slot]] = []
        present: list[Any] = []
        blocks = chain.blocks
        while blocks and len(copies) < budget and max_looks > 0:
            max_looks -= 1
            content = blocks[0].content
            if (block := state.gpu.find(content)) is not None:
                present.append(block)
            elif content in state.jobs.loading:
                self._wait_for(state.jobs.loading[content])
            elif (slot := state.slots.get(content)) is not None:
                copies.append((blocks[0], slot))
            elif chain.unread or self._is_being_read(content):
                self._is_blocked = True
                break
            else:
                blocks.clear()  # without it, what follows is no prefix
                chain.unread.clear()
                break
            blocks.popleft()
        self._num_already += len(present)
        self.hold(present)
        return copies

    def _is_being_read(self, content: Content) -> bool:
        store = self._state.remote
        return store is not None and content in store.reading

    def _load(self, wanted: list[tuple[ContextBlock, Slot]]) -> None:
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
        kept = [self._kept.pop(block.content, None) for block, _ in wanted]
        state.slots.unpin([slot for slot in kept if slot is not None])
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


class _Chain:
    """The blocks of one sequence that are still to be brought back.

    Attributes:
        blocks: nothing works on them yet.
        unread: values that the store was not asked for.
    """

    __slots__ = ("blocks", "unread")

    def __init__(self, blocks: deque[ContextBlock]) -> None:
        self.blocks = blocks
        self.unread: deque[Value] = deque()
