"""Keeps saved keys of live leases alive, where being looked up does so.

On a thread of its own, since an idle engine does nothing; the inner connector is never
in two calls at once, because both threads hold its lock.
"""

from __future__ import annotations

import logging
import threading

from sam_connector.connector.spm.inner import InnerScheduler
from sam_connector.connector.spm.saved_keys import SavedKeys
from sam_connector.connector.spm.sequences import SequenceBook, TokenSequence
from sam_connector.core.clock import Clock
from sam_connector.core.types import BlockHash, SessionKey
from sam_connector.pooling.keep_alive import KeepAlive
from sam_connector.pooling.leases import SessionLeases

logger = logging.getLogger(__name__)

#: Between two looks at what is due.
_TICK_S = 0.5
#: Keys that may be due at a time; what exceeds it stays due.
_MAX_DUE = 256


class LookupKeepAlive:
    """Looks up what leases cover, once per interval.

    Args:
        inner: the inner connector.
        book: tokens of sessions.
        keys: what is saved.
        clock: where time comes from.
        interval_s: between two refreshes of a key.
        has_thread: whether ``refresh`` is called by a thread of ours.
    """

    def __init__(
        self,
        inner: InnerScheduler,
        book: SequenceBook,
        keys: SavedKeys,
        clock: Clock,
        *,
        interval_s: float,
        has_thread: bool = True,
    ) -> None:
        self._inner = inner
        self._book = book
        self._keys = keys
        self._clock = clock
        self._schedule = KeepAlive(keys.tracker, interval_s=interval_s)
        self._tick_s = min(_TICK_S, interval_s)
        self._leases = SessionLeases()
        self._has_thread = has_thread
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.num_refreshed = 0

    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        """0 for no lease any more."""
        expire_at = self._leases.set(session, context_id, deadline)
        self._schedule.set_lease(session, expire_at)
        if deadline and self._has_thread and self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="sam-spm-keep-alive", daemon=True
            )
            self._thread.start()

    def forget(self, session: SessionKey) -> None:
        self._leases.forget(session)
        self._schedule.set_lease(session, 0.0)

    def clear(self) -> None:
        self._leases.clear()
        self._schedule.clear()

    def refresh(self) -> None:
        """Looks up what is due now."""
        with self._inner.lock:
            due = self._schedule.due(self._clock.now(), _MAX_DUE)
            sequences = self._sequences_by_leaf() if due else {}
        for _, block_hash in due:
            # The lock is given up between two look-ups: a step may wait for it.
            with self._inner.lock:
                found = sequences.get(block_hash)
                if found is not None and not self._closed.is_set():
                    self._inner.num_found(*found)
                    self.num_refreshed += 1

    def stop(self) -> None:
        """Looks up nothing any more."""
        self._closed.set()

    def close(self) -> None:
        """Not to be called with the lock held."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _sequences_by_leaf(self) -> dict[BlockHash, tuple[TokenSequence, int]]:
        """What to look up for a key; a look-up refreshes all that comes before too."""
        found = {}
        for session in self._leases:
            for sequence in self._book.of(session):
                num_saved = self._keys.num_saved(sequence, len(sequence))
                if num_saved:
                    found[sequence.hashes[num_saved - 1]] = sequence, num_saved
        return found

    def _run(self) -> None:
        while not self._closed.wait(self._tick_s):
            try:
                self.refresh()
            except Exception:
                logger.exception("keep-alive has stopped after an internal error")
                return
