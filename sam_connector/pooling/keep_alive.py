"""When values are to be refreshed in the store, so that they outlive their TTL.

One refresh per interval of everything that live leases cover, spread out over the
interval, and each shared value once. Decides only; somebody else does the calls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError
from sam_connector.pooling.key_space import Chunk
from sam_connector.pooling.tracker import SessionKeyTracker

#: Chunks that can wait for a refresh out of turn; more are left to their TTL.
_MAX_REQUESTED = 1 << 18


class KeepAlive:
    """Plans refreshes.

    A round begins once an interval, and visits every session that has a lease then. A
    round that cannot be finished in time, because the store is slow, is finished
    before the next begins, so that the last sessions get their turn as well.

    Args:
        tracker: whose chunks are refreshed; those that no session wants are not.
        interval_s: from the beginning of one round to that of the next.
    """

    def __init__(self, tracker: SessionKeyTracker, interval_s: float) -> None:
        self._tracker = tracker
        self._interval_s = interval_s
        self._expire_at: dict[SessionKey, float] = {}
        self._requested: dict[Chunk, None] = {}
        self._round_started_at = -math.inf
        self._num_planned = 0
        self._num_visited = 0
        self._sessions: deque[SessionKey] = deque()
        #: Of the session that is being visited.
        self._session: SessionKey | None = None
        self._chunks: deque[Chunk] = deque()
        #: Shared chunks that this round has refreshed.
        self._done: set[Chunk] = set()
        self.num_rounds = 0

    @property
    def num_leases(self) -> int:
        return len(self._expire_at)

    @property
    def has_work(self) -> bool:
        """Whether time alone may make something due."""
        return bool(self._expire_at or self._requested)

    def has_lease(self, session: SessionKey, now: float) -> bool:
        return self._expire_at.get(session, -math.inf) > now

    def set_lease(self, session: SessionKey, expire_at: float) -> None:
        """The session's chunks are to live until then; 0 ends that."""
        if expire_at:
            self._expire_at[session] = expire_at
        else:
            self._expire_at.pop(session, None)
        self._tracker.set_leased(session, bool(expire_at))

    def request(self, chunks: Iterable[Chunk]) -> None:
        """Refreshes chunks once, at the next occasion, leased or not."""
        for chunk in chunks:
            if len(self._requested) >= _MAX_REQUESTED:
                break
            self._requested[chunk] = None

    def due(self, now: float, max_chunks: int) -> list[Chunk]:
        """Takes what is to be refreshed now, at most ``max_chunks``."""
        batch: list[Chunk] = []
        while self._requested and len(batch) < max_chunks:
            chunk = next(iter(self._requested))
            del self._requested[chunk]
            if self._tracker.is_known(chunk):
                batch.append(chunk)
        if self._is_round_over and now - self._round_started_at >= self._interval_s:
            self._begin_round(now)
        elapsed = (now - self._round_started_at) / self._interval_s
        planned = math.ceil(min(1.0, elapsed) * self._num_planned)
        while len(batch) < max_chunks and self._num_visited < planned:
            next_chunk = self._next_chunk(now)
            if next_chunk is None:
                break
            batch.append(next_chunk)
        if not self._is_round_over and self._num_visited >= self._num_planned:
            # Sessions have grown since; what they have gained is fresh or requested.
            self._end_round()
        return batch

    def clear(self) -> None:
        """Forgets all leases."""
        self._expire_at.clear()
        self._requested.clear()
        self._end_round()

    @property
    def _is_round_over(self) -> bool:
        return not self._sessions and not self._chunks

    def _begin_round(self, now: float) -> None:
        self.num_rounds += 1
        self._round_started_at = now
        self._done.clear()
        self._num_visited = 0
        for session in [s for s, end in self._expire_at.items() if end <= now]:
            self.set_lease(session, 0)
        self._sessions = deque(s for s in self._expire_at if s in self._tracker)
        self._num_planned = sum(map(self._tracker.num_chunks_of, self._sessions))

    def _end_round(self) -> None:
        self._sessions.clear()
        self._chunks.clear()
        self._session = None
        self._done.clear()

    def _next_chunk(self, now: float) -> Chunk | None:
        while True:
            if self._session is None or not self.has_lease(self._session, now):
                self._num_visited += len(self._chunks)
                self._chunks.clear()
            if not self._chunks:
                if not self._sessions:
                    return None
                self._session = self._sessions.popleft()
                self._chunks.extend(self._tracker.chunks_of(self._session))
                continue
            chunk = self._chunks.popleft()
            self._num_visited += 1
            num_sessions = self._tracker.num_sessions(chunk)
            if not num_sessions or chunk in self._done:
                continue
            if num_sessions > 1:
                self._done.add(chunk)
            return chunk

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if a round is inconsistent."""
        if self._chunks and self._session is None:
            raise IntegrityError("chunks of no session are being refreshed")
        if any(end <= 0 for end in self._expire_at.values()):
            raise IntegrityError("a lease that has no end")
