"""The pooling layer's sessions and the chunks they have in the store."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from benchmarks.core_ops.engine_pool import GROUP, HASH_BYTES
from benchmarks.core_ops.timing import Batch
from sam_connector.core.types import BlockHash, SessionKey
from sam_connector.pooling.key_space import Chunk
from sam_connector.pooling.tracker import SessionKeyTracker

NUM_SESSIONS = 60
NUM_CHUNKS = 64
NUM_ADDED = 8
NUM_LOOKUPS = 4_000

Added = Sequence[tuple[SessionKey, list[Chunk]]]


class TrackerSubject:
    """Sessions of 64 chunks each.

    Args:
        num_entries: chunks of all sessions together.
    """

    def __init__(self, num_entries: int) -> None:
        self._rng = random.Random(num_entries)
        self._tracker = SessionKeyTracker()
        self._chunks = {
            SessionKey("", f"session-{number}"): self._new_chunks(NUM_CHUNKS)
            for number in range(num_entries // NUM_CHUNKS)
        }
        self._sessions = list(self._chunks)
        _add(self._tracker, list(self._chunks.items()))

    def batches(self) -> Iterator[Batch]:
        picked = self._rng.sample(
            self._sessions, min(NUM_SESSIONS, len(self._sessions) // 2)
        )
        added = [(session, self._new_chunks(NUM_ADDED)) for session in picked]
        yield _batch("add", added, partial(_add, self._tracker, added))
        yield _batch("drop", added, partial(_drop, self._tracker, added))
        asked = [
            self._chunks[session][self._rng.randrange(NUM_CHUNKS)]
            for session in self._rng.choices(self._sessions, k=NUM_LOOKUPS)
        ]
        lookup = partial(_look_up, self._tracker, asked)
        yield Batch(name="lookup", num_ops=len(asked), run=lookup)
        whole = [(session, self._chunks[session]) for session in picked]
        yield _batch("remove", whole, partial(_remove, self._tracker, picked))
        yield _batch("add_session", whole, partial(_add, self._tracker, whole))

    def _new_chunks(self, count: int) -> list[Chunk]:
        randbytes = self._rng.randbytes
        return [(GROUP, BlockHash(randbytes(HASH_BYTES))) for _ in range(count)]


def _batch(name: str, added: Added, run: partial[None]) -> Batch:
    """The cost is that of a chunk."""
    return Batch(name=name, num_ops=sum(len(chunks) for _, chunks in added), run=run)


def _add(tracker: SessionKeyTracker, added: Added) -> None:
    for session, chunks in added:
        tracker.add(session, chunks)


def _drop(tracker: SessionKeyTracker, added: Added) -> None:
    for _, chunks in added:
        tracker.drop_chunks(chunks)


def _remove(tracker: SessionKeyTracker, sessions: Iterable[SessionKey]) -> None:
    for session in sessions:
        tracker.remove(session)


def _look_up(tracker: SessionKeyTracker, chunks: Iterable[Chunk]) -> None:
    num_sessions = tracker.num_sessions
    for chunk in chunks:
        num_sessions(chunk)
