"""Which values in the store belong to which sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError
from sam_connector.pooling.key_space import Chunk

#: (session, chunk) pairs that are tidied up in one go.
_MAX_TIDIED = 1_000


class SessionKeyTracker:
    """The RFC's session to keys and keys to sessions.

    A chunk that many sessions share is dropped at once; that it is gone from each of
    their accounts as well is made up for later, see ``tidy``. Not thread-safe.

    Args:
        max_entries: (session, chunk) pairs; beyond that the sessions that were
            added to least recently are forgotten, and no longer kept alive.

    Attributes:
        num_orphaned: chunks that lost their last session, ever.
    """

    def __init__(self, max_entries: int = 4_194_304) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        # Dicts for their order: a session's chunks as they were added.
        self._chunks: dict[SessionKey, dict[Chunk, None]] = {}
        # A session, or for the few that are shared, a set of them: most chunks have
        # one, and a set for each would cost more than all the rest.
        self._sessions: dict[Chunk, SessionKey | set[SessionKey]] = {}
        self._num_shared = 0
        #: Dropped chunks, and whose accounts they may still be in.
        self._dropped: deque[tuple[Chunk, set[SessionKey]]] = deque()
        self.num_orphaned = 0

    def __contains__(self, session: SessionKey) -> bool:
        return any(self._has(session, chunk) for chunk in self._chunks.get(session, ()))

    def add(self, session: SessionKey, chunks: Iterable[Chunk]) -> list[SessionKey]:
        """The session has these.

        Returns:
            Sessions that were forgotten to make room.
        """
        known = self._chunks.pop(session, {})
        for chunk in chunks:
            if chunk not in known:
                known[chunk] = None
                self._num_entries += 1
                self._link(chunk, session)
            elif self._dropped and not self._has(session, chunk):
                self._link(chunk, session)
        if known:
            self._chunks[session] = known
        forgotten = []
        while self._num_entries > self._max_entries and len(self._chunks) > 1:
            oldest = next(iter(self._chunks))
            self.remove(oldest)
            forgotten.append(oldest)
        return forgotten

    def retain(self, session: SessionKey, wanted: Container[Chunk]) -> None:
        """The session has nothing besides these any more."""
        known = self._chunks.get(session, {})
        for chunk in [chunk for chunk in known if chunk not in wanted]:
            del known[chunk]
            self._num_entries -= 1
            if self._has(session, chunk):
                self._unlink(chunk, session)
        if not known:
            self._chunks.pop(session, None)

    def remove(self, session: SessionKey) -> list[Chunk]:
        """The session has nothing any more; returns what is orphaned by it."""
        chunks = self._chunks.pop(session, {})
        self._num_entries -= len(chunks)
        return [
            chunk
            for chunk in chunks
            if self._has(session, chunk) and self._unlink(chunk, session)
        ]

    def drop_chunks(self, chunks: Iterable[Chunk]) -> None:
        """They are not in the store.

        Takes no longer the more sessions share them.
        """
        for chunk in chunks:
            holders = self._sessions.pop(chunk, None)
            if holders is None:
                continue
            self.num_orphaned += 1
            if isinstance(holders, set):
                self._num_shared -= 1
                self._dropped.append((chunk, holders))
            else:
                self._dropped.append((chunk, {holders}))
        self.tidy()

    def tidy(self) -> bool:
        """Takes some dropped chunks out of accounts; returns whether more are left."""
        for _ in range(_MAX_TIDIED):
            if not self._dropped:
                return False
            chunk, sessions = self._dropped[0]
            session = sessions.pop()
            if not sessions:
                self._dropped.popleft()
            known = self._chunks.get(session, {})
            # It may have been written again since, or the session be another.
            if chunk in known and not self._has(session, chunk):
                del known[chunk]
                self._num_entries -= 1
                if not known:
                    del self._chunks[session]
        return bool(self._dropped)

    def clear(self) -> None:
        self._dropped.clear()
        self._chunks.clear()
        self._sessions.clear()
        self._num_entries = self._num_shared = 0

    def chunks_of(self, session: SessionKey) -> Sequence[Chunk]:
        """In the order in which they were added."""
        known = self._chunks.get(session, ())
        if not self._dropped:
            return list(known)
        return [chunk for chunk in known if self._has(session, chunk)]

    def num_chunks_of(self, session: SessionKey) -> int:
        return len(self.chunks_of(session))

    def sessions_of(self, chunk: Chunk) -> Iterator[SessionKey]:
        holders = self._sessions.get(chunk)
        if isinstance(holders, set):
            yield from holders
        elif holders is not None:
            yield holders

    def is_known(self, chunk: Chunk) -> bool:
        """Whether any session has the chunk."""
        return chunk in self._sessions

    def num_sessions(self, chunk: Chunk) -> int:
        holders = self._sessions.get(chunk)
        if isinstance(holders, set):
            return len(holders)
        return int(holders is not None)

    def unshared_tail(
        self, session: SessionKey, chunks: Sequence[Chunk]
    ) -> Sequence[Chunk]:
        """What follows the longest prefix that another known session shares.

        Args:
            session: whose chunks.
            chunks: of one sequence, in its order.
        """
        for index in range(len(chunks) - 1, -1, -1):
            others = (s for s in self.sessions_of(chunks[index]) if s != session)
            if next(others, None) is not None:
                return chunks[index + 1 :]
        return chunks

    @property
    def num_sessions_known(self) -> int:
        return len(self._chunks)

    @property
    def num_chunks(self) -> int:
        return len(self._sessions)

    @property
    def num_shared(self) -> int:
        """Chunks that several sessions have."""
        return self._num_shared

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the two directions disagree."""
        forward = {(s, c) for s, chunks in self._chunks.items() for c in chunks}
        backward = {(s, c) for c in self._sessions for s in self.sessions_of(c)}
        dropped = {(s, c) for c, sessions in self._dropped for s in sessions}
        is_right = backward <= forward and forward - backward <= dropped
        if not is_right or len(forward) != self._num_entries:
            raise IntegrityError("sessions and their chunks disagree")
        if not all(self._chunks.values()):
            raise IntegrityError("a session without chunks is remembered")
        shared = sum(self.num_sessions(chunk) > 1 for chunk in self._sessions)
        if shared != self._num_shared:
            raise IntegrityError(f"{shared} chunks are shared, not {self._num_shared}")

    def _has(self, session: SessionKey, chunk: Chunk) -> bool:
        holders = self._sessions.get(chunk)
        return session in holders if isinstance(holders, set) else session == holders

    def _link(self, chunk: Chunk, session: SessionKey) -> None:
        holders = self._sessions.get(chunk)
        if holders is None:
            self._sessions[chunk] = session
        elif isinstance(holders, set):
            holders.add(session)
        else:
            self._sessions[chunk] = {holders, session}
            self._num_shared += 1

    def _unlink(self, chunk: Chunk, session: SessionKey) -> bool:
        """Returns whether nobody has the chunk now."""
        holders = self._sessions[chunk]
        if isinstance(holders, set):
            holders.discard(session)
            if len(holders) == 1:
                self._sessions[chunk] = next(iter(holders))
                self._num_shared -= 1
            return False
        del self._sessions[chunk]
        self.num_orphaned += 1
        return True
