"""When which values are refreshed, so that those of live leases do not expire."""

from __future__ import annotations

from sam_connector.core.types import SessionKey
from sam_connector.pooling.key_space import Chunk
from sam_connector.pooling.tracker import SessionKeyTracker


class KeepAlive:
    """Goes through all live leases once per interval, and through their chunks.

    The work is spread: at any time as large a share of the sessions has been refreshed
    as of the interval has passed. A chunk that several sessions share is refreshed
    once, and so is a session's manifest. Pure: time is an argument, and what is due is
    returned. Not thread-safe.

    Args:
        tracker: knows the sessions' chunks.
        interval_s: between two refreshes of a chunk.
    """

    def __init__(self, tracker: SessionKeyTracker, *, interval_s: float) -> None:
        self._tracker = tracker
        self._interval_s = interval_s
        self._expire_at: dict[SessionKey, float] = {}
        self._round_started_at: float | None = None
        #: Sessions whose turn is still to come in this round, the next at the end.
        self._sessions: list[SessionKey] = []
        self._num_in_round = 0
        #: Chunks that are due.
        self._due: list[Chunk] = []
        #: Sessions whose manifests are due; a dict for its order.
        self._due_sessions: dict[SessionKey, None] = {}
        #: Shared chunks that were due in this round.
        self._seen: set[Chunk] = set()

    def __len__(self) -> int:
        return len(self._expire_at)

    def set_lease(self, session: SessionKey, expire_at: float) -> None:
        """The session's values are wanted until ``expire_at``; 0 for no longer."""
        if expire_at:
            self._expire_at[session] = expire_at
        else:
            self._forget(session)

    def is_leased(self, session: SessionKey, now: float) -> bool:
        return self._expire_at.get(session, 0.0) > now

    def clear(self) -> None:
        self._expire_at.clear()
        self._sessions.clear()
        self._due.clear()
        self._due_sessions.clear()

    def next_session(self, now: float) -> SessionKey | None:
        """Whose manifest to refresh now; sessions come as their chunks do."""
        while self._due_sessions:
            session = next(iter(self._due_sessions))
            del self._due_sessions[session]
            if self.is_leased(session, now):
                return session
        return None

    def due(self, now: float, max_chunks: int) -> list[Chunk]:
        """Chunks to refresh now; what exceeds ``max_chunks`` stays due."""
        started_at = self._round_started_at
        if not self._sessions and (
            started_at is None or now >= started_at + self._interval_s
        ):
            started_at = self._begin_round(now)
        assert started_at is not None
        share = min(1.0, (now - started_at) / self._interval_s)
        num_left = self._num_in_round - int(self._num_in_round * share)
        while len(self._sessions) > num_left and len(self._due) < max_chunks:
            self._add(self._sessions.pop(), now)
        batch, self._due = self._due[:max_chunks], self._due[max_chunks:]
        # A lease may have ended, or a chunk be orphaned, since its turn came.
        return [chunk for chunk in batch if self._is_wanted(chunk, now)]

    def _begin_round(self, now: float) -> float:
        self._sessions = list(self._expire_at)
        self._sessions.reverse()
        self._num_in_round = len(self._sessions)
        self._seen.clear()
        self._round_started_at = now
        return now

    def _add(self, session: SessionKey, now: float) -> None:
        if not self.is_leased(session, now):
            self._forget(session)
            return
        self._due_sessions[session] = None
        for chunk in self._tracker.chunks_of(session):
            if self._tracker.num_sessions(chunk) > 1:
                if chunk in self._seen:
                    continue
                self._seen.add(chunk)
            self._due.append(chunk)

    def _forget(self, session: SessionKey) -> None:
        self._expire_at.pop(session, None)
        self._due_sessions.pop(session, None)

    def _is_wanted(self, chunk: Chunk, now: float) -> bool:
        return any(self.is_leased(s, now) for s in self._tracker.sessions_of(chunk))
