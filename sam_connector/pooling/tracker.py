"""Which values in the store belong to which sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError
from sam_connector.pooling.key_space import Chunk


class SessionKeyTracker:
    """The RFC's session to keys and keys to sessions.

    Not thread-safe.

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
        self.num_orphaned = 0

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._chunks

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
        if known:
            self._chunks[session] = known
        forgotten = []
        while self._num_entries > self._max_entries and len(self._chunks) > 1:
            oldest = next(iter(self._chunks))
            self.remove(oldest)
            forgotten.append(oldest)
        return forgotten

    def remove(self, session: SessionKey) -> list[Chunk]:
        """The session has nothing any more; returns what is orphaned by it."""
        chunks = self._chunks.pop(session, {})
        self._num_entries -= len(chunks)
        return [chunk for chunk in chunks if self._unlink(chunk, session)]

    def drop_chunks(self, chunks: Iterable[Chunk]) -> None:
        """They are not in the store."""
        for chunk in chunks:
            for session in list(self.sessions_of(chunk)):
                del self._chunks[session][chunk]
                if not self._chunks[session]:
                    del self._chunks[session]
                self._num_entries -= 1
                self._unlink(chunk, session)

    def clear(self) -> None:
        self._chunks.clear()
        self._sessions.clear()
        self._num_entries = self._num_shared = 0

    def chunks_of(self, session: SessionKey) -> Sequence[Chunk]:
        """In the order in which they were added."""
        return list(self._chunks.get(session, ()))

    def num_chunks_of(self, session: SessionKey) -> int:
        return len(self._chunks.get(session, ()))

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
        if forward != backward or len(forward) != self._num_entries:
            raise IntegrityError("sessions and their chunks disagree")
        if not all(self._chunks.values()):
            raise IntegrityError("a session without chunks is remembered")
        shared = sum(self.num_sessions(chunk) > 1 for chunk in self._sessions)
        if shared != self._num_shared:
            raise IntegrityError(f"{shared} chunks are shared, not {self._num_shared}")

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
