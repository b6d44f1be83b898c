"""Sessions and contexts, with their leases and without their blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.core_ops.engine_pool import EnginePool
from benchmarks.core_ops.timing import Batch
from sam_connector.core.block_index import BlockIndex
from sam_connector.core.contexts import ContextBook
from sam_connector.core.limits import Limits
from sam_connector.core.retention import Retention
from sam_connector.core.session_index import Context
from sam_connector.core.ttl import LeaseTable
from sam_connector.core.types import SessionKey

NUM_OPS = 1_000
NOW = 0.0

#: What a session costs from its first request to its end, one turn in between.
LIFE = ("get", "open", "touch", "lease", "end_lease", "drop")


class SessionsSubject:
    """Sessions of one context each, every second of them under a lease.

    What blocks cost is the index's to say: these contexts have none.

    Args:
        num_entries: sessions.
    """

    def __init__(self, num_entries: int) -> None:
        self._rng = random.Random(num_entries)
        retention = Retention(EnginePool(1).adapter, num_blocks=2, max_protected=1)
        self.book = ContextBook(
            BlockIndex(retention),
            LeaseTable(idle_ttl_s=3_600.0, now=NOW),
            retention,
            Limits(max_sessions=2 * num_entries),
        )
        self._keys = [
            SessionKey("", f"session-{number}") for number in range(num_entries)
        ]
        for key in self._keys:
            self._open(key)
        for key in self._keys[::2]:
            self._lease(self._context(key))

    def batches(self) -> Iterator[Batch]:
        picked = self._rng.sample(self._keys, min(NUM_OPS, len(self._keys) // 2))
        contexts = [self._context(key) for key in picked]
        yield _batch("get", picked, self.book.sessions.get)
        yield _batch("touch", contexts, self._touch)
        yield _batch("lease", contexts, self._lease)
        yield _batch("end_lease", contexts, self._end_lease)
        sessions = [context.session for context in contexts]
        yield _batch("drop", sessions, self.book.drop_session)
        yield _batch("open", picked, self._open)

    def _context(self, key: SessionKey) -> Context:
        session = self.book.sessions.get(key)
        assert session is not None
        return session.contexts[0]

    def _open(self, key: SessionKey) -> None:
        session = self.book.register(key)
        assert session is not None
        self.book.open(session, 0, NOW)

    def _touch(self, context: Context) -> None:
        self.book.touch(context, NOW)

    def _lease(self, context: Context) -> None:
        self.book.lease(context, NOW + self._rng.uniform(60.0, 3_600.0), None)

    def _end_lease(self, context: Context) -> None:
        self.book.end_lease(context, NOW)


def _batch(name: str, items: Sequence[Any], call: Callable[[Any], object]) -> Batch:
    return Batch(name=name, num_ops=len(items), run=lambda: _each(call, items))


def _each(call: Callable[[Any], object], items: Iterable[Any]) -> None:
    for item in items:
        call(item)
