"""Which sessions want which chunks to live.

Counterpart of the RFC's ``SessionKeyTracker``: what is named here is in the store, as
far as we know.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError
from sam_connector.pooling.key_space import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerStats:
    """What is tracked.

    Attributes:
        num_sessions: sessions with chunks.
        num_chunks: different chunks.
        num_entries: chunks of all sessions; shared ones count several times.
        num_shared: chunks of more than one session.
        num_orphaned: chunks that lost their last session, ever.
        num_forgotten: sessions forgotten for want of room, ever.
    """

    num_sessions: int
    num_chunks: int
    num_entries: int
    num_shared: int
    num_orphaned: int
    num_forgotten: int


class SessionKeyTracker:
    """Sessions' chunks, and chunks' sessions.

    Most chunks have one session, which is then kept as such; a set would cost as much
    as everything else about a chunk.

    Args:
        max_entries: most chunks of all sessions together. Beyond it the sessions that
            were added to longest ago are forgotten, those without a lease first, and
            those with one only for the sake of others with one.
    """

    def __init__(self, max_entries: int = 1 << 20) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._chunks: dict[SessionKey, list[Chunk]] = {}
        self._owners: dict[Chunk, SessionKey | set[SessionKey]] = {}
        #: Sessions in the order in which they were last added to.
        self._unleased: OrderedDict[SessionKey, None] = OrderedDict()
        self._leased: OrderedDict[SessionKey, None] = OrderedDict()
        #: Also those that have no chunks yet.
        self._has_lease: set[SessionKey] = set()
        self._num_shared = 0
        self._num_orphaned = 0
        self._num_forgotten = 0

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._chunks

    @property
    def num_shared(self) -> int:
        """Chunks of more than one session."""
        return self._num_shared

    @property
    def num_orphaned(self) -> int:
        """Chunks that have lost their last session, ever."""
        return self._num_orphaned

    def add(self, session: SessionKey, chunks: Iterable[Chunk]) -> int:
        """The session's values are in the store.

        Returns:
            How many are new to the session. If it alone is more than there is room
            for, its later chunks are not tracked.
        """
        num_added = 0
        for chunk in chunks:
            if self._is_owner(chunk, session):
                continue
            if self._num_entries >= self._max_entries and not self._make_room(session):
                break
            self._own(chunk, session)
            num_added += 1
        if session in self._chunks:
            self._order(session).move_to_end(session)
        return num_added

    def remove(self, session: SessionKey) -> list[Chunk]:
        """Forgets a session; returns the chunks that no session wants any more."""
        chunks = self._chunks.pop(session, None)
        if chunks is None:
            return []
        del self._order(session)[session]
        orphans = [chunk for chunk in chunks if self._disown(chunk, session)]
        self._num_orphaned += len(orphans)
        return orphans

    def drop_chunks(self, chunks: Iterable[Chunk]) -> None:
        """They are not in the store; whoever wants them has lost them."""
        lost = {chunk for chunk in chunks if chunk in self._owners}
        losers: set[SessionKey] = set()
        for chunk in lost:
            owners = self._owners_of(self._owners.pop(chunk))
            self._num_shared -= len(owners) > 1
            self._num_entries -= len(owners)
            losers |= owners
        for session in losers:
            left = [chunk for chunk in self._chunks[session] if chunk not in lost]
            if left:
                self._chunks[session] = left
            else:
                del self._order(session)[session]
                del self._chunks[session]

    def set_leased(self, session: SessionKey, is_leased: bool) -> None:
        """Whether the session is to be remembered rather than others."""
        if session in self._chunks:
            del self._order(session)[session]
            (self._leased if is_leased else self._unleased)[session] = None
        if is_leased:
            self._has_lease.add(session)
        else:
            self._has_lease.discard(session)

    def chunks_of(self, session: SessionKey) -> list[Chunk]:
        """In the order in which they were added."""
        return list(self._chunks.get(session, ()))

    def num_chunks_of(self, session: SessionKey) -> int:
        return len(self._chunks.get(session, ()))

    def is_known(self, chunk: Chunk) -> bool:
        """Whether any session wants it."""
        return chunk in self._owners

    def num_sessions(self, chunk: Chunk) -> int:
        owners = self._owners.get(chunk)
        return 0 if owners is None else len(self._owners_of(owners))

    def unshared_tail(
        self, session: SessionKey, ordered_chunks: Sequence[Chunk]
    ) -> list[Chunk]:
        """What follows the last chunk that another session wants as well."""
        for position in range(len(ordered_chunks), 0, -1):
            owners = self._owners.get(ordered_chunks[position - 1])
            if owners is not None and self._owners_of(owners) - {session}:
                return list(ordered_chunks[position:])
        return list(ordered_chunks)

    def clear(self) -> None:
        """Forgets everything."""
        self._num_entries = self._num_shared = 0
        self._has_lease.clear()
        for index in (self._chunks, self._owners, self._unleased, self._leased):
            index.clear()

    def stats(self) -> TrackerStats:
        return TrackerStats(
            num_sessions=len(self._chunks),
            num_chunks=len(self._owners),
            num_entries=self._num_entries,
            num_shared=self._num_shared,
            num_orphaned=self._num_orphaned,
            num_forgotten=self._num_forgotten,
        )

    @staticmethod
    def _owners_of(owners: SessionKey | set[SessionKey]) -> set[SessionKey]:
        return owners if isinstance(owners, set) else {owners}

    def _is_owner(self, chunk: Chunk, session: SessionKey) -> bool:
        owners = self._owners.get(chunk)
        if isinstance(owners, set):
            return session in owners
        return owners == session

    def _order(self, session: SessionKey) -> OrderedDict[SessionKey, None]:
        return self._leased if session in self._has_lease else self._unleased

    def _make_room(self, session: SessionKey) -> bool:
        """Forgets the oldest other session that may go; ``False`` if there is none."""
        orders = [self._unleased]
        if session in self._has_lease:
            orders.append(self._leased)
        for order in orders:
            for oldest in order:
                if oldest != session:
                    self.remove(oldest)
                    self._num_forgotten += 1
                    return True
        return False

    def _own(self, chunk: Chunk, session: SessionKey) -> None:
        owners = self._owners.get(chunk)
        if owners is None:
            self._owners[chunk] = session
        elif isinstance(owners, set):
            owners.add(session)
        else:
            self._owners[chunk] = {owners, session}
            self._num_shared += 1
        if session not in self._chunks:
            self._chunks[session] = []
            self._order(session)[session] = None
        self._chunks[session].append(chunk)
        self._num_entries += 1

    def _disown(self, chunk: Chunk, session: SessionKey) -> bool:
        """Returns whether nobody wants it any more."""
        self._num_entries -= 1
        owners = self._owners[chunk]
        if not isinstance(owners, set):
            del self._owners[chunk]
            return True
        owners.remove(session)
        if len(owners) == 1:
            self._owners[chunk] = owners.pop()
            self._num_shared -= 1
        return False

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the two indexes and the sums disagree."""
        pairs = {(s, chunk) for s, chunks in self._chunks.items() for chunk in chunks}
        mirrored = {
            (session, chunk)
            for chunk, owners in self._owners.items()
            for session in self._owners_of(owners)
        }
        if pairs != mirrored:
            raise IntegrityError(f"sessions and chunks differ: {pairs ^ mirrored}")
        num_listed = sum(map(len, self._chunks.values()))
        if not len(pairs) == num_listed == self._num_entries:
            raise IntegrityError(f"{self._num_entries} entries, {num_listed} listed")
        num_shared = sum(isinstance(owners, set) for owners in self._owners.values())
        if num_shared != self._num_shared:
            raise IntegrityError(f"{num_shared} shared, {self._num_shared} counted")
        if any(isinstance(o, set) and len(o) < 2 for o in self._owners.values()):
            raise IntegrityError("a chunk of one session has a set")
        if self._leased.keys() - self._has_lease:
            raise IntegrityError("a session without a lease is taken to have one")
        if self._unleased.keys() & self._has_lease:
            raise IntegrityError("a session with a lease is taken to have none")
        if self._leased.keys() | self._unleased.keys() != self._chunks.keys():
            raise IntegrityError("a session has no place in the order")
        if self._num_entries > self._max_entries:
            raise IntegrityError(f"{self._num_entries} of {self._max_entries} entries")
