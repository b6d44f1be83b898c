"""Offload: a session's blocks are copied to the tier, and on to the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from sam_connector.connector.tier.archive import Archive
from sam_connector.connector.tier.jobs import Job
from sam_connector.connector.tier.operations import Operation, blocks_of
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Content
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import SessionKey

#: How long an offload waits for a slot while copies for others hold some.
_MAX_STALL_S = 2.0


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
        self._todo = deque(
            dict.fromkeys(block.content for block in blocks_of(contexts))
        )
        self.num_requested = len(self._todo)
        self._awaited: set[Content] = set()
        #: What is in each of ``slots``.
        self._held: list[Content] = []
        self._num_lost = 0
        self._stalled_since: float | None = None
        store = state.remote
        self._archive = (
            None if store is None else Archive(store, state.slots, session, contexts)
        )

    @property
    @override
    def has_more(self) -> bool:
        return bool(self._todo) or self._has_to_archive

    @property
    @override
    def waits_for_store(self) -> bool:
        return (
            not self._todo
            and not self.num_pending
            and self._archive is not None
            and self._archive.is_waiting
        )

    @property
    def _has_to_archive(self) -> bool:
        return self._archive is not None and not self._archive.is_over

    @override
    def advance(self, budget: int, max_looks: int) -> int:
        if not self._todo:
            if self._archive is not None and not self.num_pending:
                return self._archive.advance(max_looks)
            return 0
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
            self._reason = self._reason or "a copy in the tier was lost"
            self._lose(num_gone)
        elif self._archive is not None and self._archive.num_unwritten:
            self._reason = self._archive.reason
            self._lose(self._archive.num_unwritten)
        return super().end()

    def _lose(self, num_blocks: int) -> None:
        """Blocks that were counted as safe are not."""
        self._num_lost += num_blocks
        self._num_already -= num_blocks
        self._num_done = max(0, self._num_done + min(0, self._num_already))
        self._num_already = max(0, self._num_already)

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
        if self._archive is not None:
            self._archive.close()
        if not self._num_lost:
            owners = [(self.session, context_id) for context_id in self.context_ids]
            self._state.keep(owners)
        self.let_go_of_pins()
