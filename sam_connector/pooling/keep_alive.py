"""When which values are refreshed, so that those of live leases do not expire."""

from __future__ import annotations

from sam_connector.core.types import SessionKey
from sam_connector.pooling.key_space import Chunk
from sam_connector.pooling.tracker import SessionKeyTracker


class KeepAlive:
    """Goes through the chunks of all live leases once per interval.

    The work is spread: at any time so many chunks have been refreshed as the share of
    the interval that has passed. A chunk that several sessions share is refreshed
    once. Pure: time is an argument, and what is due is returned. Not thread-safe.

    Args:
        tracker: knows the sessions' chunks.
        interval_s: between two refreshes of a chunk.
    """

    def __init__(self, tracker: SessionKeyTracker, *, interval_s: float) -> None:
        self._tracker = tracker
        self._interval_s = interval_s
        self._expire_at: dict[SessionKey, float] = {}
        self._round_started_at = 0.0
        #: Chunks still to be refreshed in this round, the next one at the end.
        self._todo: list[Chunk] = []
        self._num_in_round = 0
        self._num_done = 0

    def __len__(self) -> int:
        return len(self._expire_at)

    def set_lease(self, session: SessionKey, expire_at: float) -> None:
        """The session's values are wanted until ``expire_at``; 0 for no longer."""
        if expire_at:
            self._expire_at[session] = expire_at
        else:
            self._expire_at.pop(session, None)

    def is_leased(self, session: SessionKey, now: float) -> bool:
        return self._expire_at.get(session, 0.0) > now

    def clear(self) -> None:
        self._expire_at.clear()
        self._todo.clear()

    def due(self, now: float, max_chunks: int) -> list[Chunk]:
        """Chunks to refresh now; what exceeds ``max_chunks`` stays due."""
        if now >= self._round_started_at + self._interval_s and not self._todo:
            self._begin_round(now)
        share = min(1.0, (now - self._round_started_at) / self._interval_s)
        num_due = int(self._num_in_round * share) - self._num_done
        batch: list[Chunk] = []
        while self._todo and len(batch) < min(num_due, max_chunks):
            chunk = self._todo.pop()
            self._num_done += 1
            # Its lease may have ended, or it may be orphaned, since the round began.
            if any(self.is_leased(s, now) for s in self._tracker.sessions_of(chunk)):
                batch.append(chunk)
        return batch

    def _begin_round(self, now: float) -> None:
        self._expire_at = {
            session: expire_at
            for session, expire_at in self._expire_at.items()
            if expire_at > now
        }
        chunks = {
            chunk: None
            for session in self._expire_at
            for chunk in self._tracker.chunks_of(session)
        }
        self._todo = list(chunks)
        self._todo.reverse()
        self._num_in_round = len(self._todo)
        self._num_done = 0
        self._round_started_at = now
