"""Copies to the tier that nobody asked for: the save policy."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from sam_connector.config import SavePolicy
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.types import SessionKey

#: Blocks of the backlog that are looked at in one step.
_MAX_LOOKS = 2_048

#: Blocks that wait to be saved; beyond that the oldest are not saved.
_MAX_BACKLOG = 65_536


class Saver:
    """Decides what is saved when.

    ``all`` saves every full block once its request has completed. ``hinted`` saves
    ahead of need: while few unclaimed blocks are left, what sessions hold is copied
    before it can be lost, so that breaking a claim costs a copy back and not a
    prefill. First what a session's request has just added, while it is in hand;
    then the free blocks that are next to be taken.

    Args:
        state: of the tier.
        demotion_window: how many blocks the engine may allocate before the next
            copies have ended: with fewer unclaimed ones, demotion begins.
    """

    def __init__(self, state: TierState, *, demotion_window: int) -> None:
        self._state = state
        self._window = demotion_window
        #: So many blocks must be handed out before it is worth looking again.
        self._stride = max(1, demotion_window // 8)
        self._demotes = state.config.save_policy is SavePolicy.HINTED
        #: ``num_taken`` of the engine when demotion looked last.
        self._looked_at = -self._stride
        self._backlog: deque[tuple[Content, tuple[SessionKey, int] | None]] = deque()
        #: By block id the hash of the content that demotion has seen there. A block
        #: is demoted once: in a tier smaller than the engine's cache two blocks would
        #: otherwise displace each other's copies for ever.
        self._seen: dict[int, bytes] = {}

    @property
    def policy(self) -> SavePolicy:
        return self._state.config.save_policy

    @property
    def num_queued(self) -> int:
        return len(self._backlog)

    def wants_finished(self, *, is_session: bool) -> bool:
        """Whether to save the blocks of a request that completes now."""
        if self.policy is SavePolicy.HINTED:
            return is_session and self._is_under_pressure
        return self.policy is SavePolicy.ALL

    def save_finished(
        self,
        blocks: Mapping[Content, Any],
        context: tuple[SessionKey, int] | None,
    ) -> None:
        """Saves the computed blocks of a request, which still has them.

        What exceeds the budget is queued, and saved if it is still there by then.

        Args:
            blocks: block by content, as the request's tables say.
            context: whose blocks these are, if they are a session's.
        """
        state = self._state
        # All of them: the tier may have lost the beginning of what it has the end of.
        missing = state.slots.missing(blocks)
        wanted = [
            (content, blocks[content])
            for content in missing
            if content not in state.jobs.storing
            and state.gpu.holds(blocks[content], content)
        ]
        budget = max(0, state.budget)
        contexts = set() if context is None else {context}
        present = self._at_risk(blocks, len(wanted))
        state.slots.pin(present)
        self._store(wanted[:budget], contexts)
        state.slots.unpin(present[::-1])
        for content, _ in wanted[budget:]:
            if len(self._backlog) >= _MAX_BACKLOG:
                self._backlog.popleft()
                state.counts["saves_dropped"] += 1
            self._backlog.append((content, context))

    @property
    def is_due(self) -> bool:
        """Whether ``on_step`` has anything to do; cheap, asked in every step."""
        return bool(self._backlog) or (self._demotes and self._may_look)

    def on_step(self) -> None:
        if self._backlog:
            self._save_queued()
        if self._demotes and self._may_look:
            self._demote()

    def _save_queued(self) -> None:
        """Starts what fits into the budget; what is gone by now is not saved."""
        state, backlog = self._state, self._backlog
        budget = state.budget
        sources: dict[Content, Any] = {}
        contexts: set[tuple[SessionKey, int]] = set()
        for _ in range(min(len(backlog), _MAX_LOOKS)):
            if len(sources) >= budget:
                break
            content, context = backlog.popleft()
            block = None
            if content not in sources and state.is_wanted(content):
                block = state.gpu.find(content)
            if block is not None:
                sources[content] = block
                if context is not None:
                    contexts.add(context)
        self._store(list(sources.items()), contexts)

    def _at_risk(self, sequence: Iterable[Content], num_new: int) -> list[Slot]:
        """Slots of a sequence that saving more of it could displace.

        Its first blocks were saved first, so they are the first in line.
        """
        slots = self._state.slots
        if not num_new or slots.num_used + num_new <= slots.num_slots:
            return []
        found = map(slots.get, sequence)
        return [slot for slot in found if slot is not None]

    def try_again(self, blocks: Iterable[Any]) -> None:
        """Copying these has failed; demotion may choose them once more."""
        for block in blocks:
            self._seen.pop(block.block_id, None)

    def clear(self) -> None:
        self._backlog.clear()
        self._seen.clear()
        self._looked_at = -self._stride

    @property
    def _may_look(self) -> bool:
        return self._state.gpu.num_taken - self._looked_at >= self._stride

    @property
    def _is_under_pressure(self) -> bool:
        return self._state.gpu.num_unclaimed < self._window

    def _demote(self) -> None:
        state, seen = self._state, self._seen
        self._looked_at = state.gpu.num_taken
        num_next = self._window - state.gpu.num_unclaimed
        if num_next <= 0:
            return
        budget = state.budget
        sources: list[tuple[Content, Any]] = []
        contexts: set[tuple[SessionKey, int]] = set()
        for block in itertools.islice(state.gpu.retained(), num_next):
            key = block.block_hash
            if key is None or seen.get(block.block_id) == key:
                continue
            if len(sources) >= budget:
                self._looked_at = -self._stride  # again in the next step
                break
            seen[block.block_id] = key
            content = state.gpu.content_of(block)
            if content is not None and state.is_wanted(content):
                sources.append((content, block))
                contexts.update(state.gpu.contexts_of(block))
        self._store(sources, contexts, is_demotion=True)

    def _store(
        self,
        sources: list[tuple[Content, Any]],
        contexts: set[tuple[SessionKey, int]],
        *,
        is_demotion: bool = False,
    ) -> None:
        if sources:
            job = self._state.store(sources, is_demotion=is_demotion, contexts=contexts)
            num_stored = 0 if job is None else len(job.copies)
            self._state.counts["saves_dropped"] += len(sources) - num_stored
