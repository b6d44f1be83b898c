"""Between the manager and the tiers below: who hears of what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from sam_connector.core.contexts import ContextBook
from sam_connector.core.edits import EditController
from sam_connector.core.session_index import Context
from sam_connector.core.tiers import (
    SupportsSessionAwareKVManagement,
    TierEvent,
    TierEventType,
)
from sam_connector.core.types import SessionKey


class TierRelay:
    """Tells tiers what becomes of contexts, and takes what they have to say.

    Args:
        book: the contexts.
        edits: told of the ends of operations.
        tiers: asked at every call, since tiers may appear after start-up.

    Attributes:
        counts: what tiers have reported, in blocks or, for PRESSURE, in times.
        num_bytes: the same in bytes.
    """

    def __init__(
        self,
        book: ContextBook,
        edits: EditController,
        tiers: Callable[[], Sequence[SupportsSessionAwareKVManagement]],
    ) -> None:
        self._book = book
        self._edits = edits
        self._tiers = tiers
        self.counts = dict.fromkeys(TierEventType, 0)
        self.num_bytes = dict.fromkeys(TierEventType, 0)

    def on_request_finished(self, request_id: str, context: Context) -> None:
        """A request of the context has completed."""
        if context.is_live:
            contents = functools.partial(self._book.blocks_of, context)
            for tier in self._tiers():
                tier.register_cache(context.session.key, request_id, contents)

    def on_lease_changed(self, context: Context) -> None:
        for tier in self._tiers():
            tier.set_lease(context.session.key, context.context_id, context.deadline)

    def on_resume_changed(self, context: Context) -> None:
        for tier in self._tiers():
            tier.set_resume(context.session.key, context.context_id, context.resume_at)

    def on_dropped(self, context: Context) -> None:
        for tier in self._tiers():
            tier.release(context.session.key, context.context_id)

    def on_freed(self, session: SessionKey) -> None:
        for tier in self._tiers():
            tier.forget(session)

    def take_events(self) -> bool:
        """Hears all tiers; returns whether one wants to be asked in every step."""
        is_polled = False
        for tier in self._tiers():
            is_polled |= tier.is_polled
            for event in tier.take_session_events():
                self._on_event(event)
        return is_polled

    def _on_event(self, event: TierEvent) -> None:
        count = 1 if event.type is TierEventType.PRESSURE else event.num_blocks
        self.counts[event.type] += count
        self.num_bytes[event.type] += event.num_bytes
        if event.type is TierEventType.OPERATION:
            assert event.operation_id is not None
            assert event.handle is not None
            self._edits.complete(event.operation_id, event.handle)
