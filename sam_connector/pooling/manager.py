"""The session-aware pooling manager: sessions and their values in a store."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sam_connector.core.clock import Clock
from sam_connector.core.types import GroupId, SessionKey
from sam_connector.pooling.calls import CallThread
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.events import PoolEvent
from sam_connector.pooling.keep_alive import KeepAlive
from sam_connector.pooling.key_space import Chunk, KeySpace
from sam_connector.pooling.lookup import ExistenceCache
from sam_connector.pooling.manifest import ManifestContext
from sam_connector.pooling.manifest_desk import ManifestDesk
from sam_connector.pooling.tracker import SessionKeyTracker
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    BatchResult,
    ManifestStore,
    Outcome,
    StoreBackend,
)

logger = logging.getLogger(__name__)

#: At least so often it is looked whether values are due to be refreshed.
_TICK_S = 0.25

_MAX_CLOSE_S = 2.0

#: Long enough for another thread to get a lock that is wanted again at once.
_PAUSE_S = 0.0005

#: Of values that are refreshed in one go.
_MAX_BATCHES = 16

#: Manifests that are refreshed in one go, each with a call of its own.
_MAX_MANIFESTS = 64


@dataclass(slots=True)
class _Shared:
    """What the engine's thread and ours both use, under ``lock``."""

    tracker: SessionKeyTracker
    keep_alive: KeepAlive
    answers: ExistenceCache
    keys: KeySpace
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    #: Since when a question to the store has been under way.
    asked_at: float | None = None


class SessionPoolingManager:
    """The RFC's SPM, for an engine whose ranks move the bytes.

    Every method may be called from the engine's thread and returns at once: the store
    is spoken to by two threads of its own, one for look-ups, that requests wait for,
    and one for all else. Neither needs a step of the engine; keep-alive least of all.

    Args:
        store: where blocks are.
        manifests: where sessions are; ``None`` if the store keeps none.
        keys: names of this engine's values.
        config: settings.
        block_sizes: tokens per block, by group; part of a manifest.
        clock: monotonic time.
        wall_clock: Unix time, which instances compare.
        wake: called from a thread of ours when there is an event.
    """

    def __init__(
        self,
        store: StoreBackend,
        manifests: ManifestStore | None,
        keys: KeySpace,
        config: PoolingConfig,
        *,
        block_sizes: Mapping[GroupId, int],
        clock: Clock,
        wall_clock: Callable[[], float] = time.time,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._wake = wake
        tracker = SessionKeyTracker(config.max_tracked)
        self._shared = _Shared(
            tracker=tracker,
            keep_alive=KeepAlive(tracker, interval_s=config.keep_alive_interval_s),
            answers=ExistenceCache(
                positive_ttl_s=config.positive_ttl_s,
                negative_ttl_s=config.negative_ttl_s,
                deadline_s=config.lookup_timeout_s,
            ),
            keys=keys,
        )
        self._events: deque[PoolEvent] = deque()
        self._is_asking = False
        self._is_closed = False
        self._has_complained = False
        self._lookups = CallThread(
            "sam-lookup", clock, tick_s=_MAX_CLOSE_S, on_tick=lambda: None
        )
        self._calls = CallThread(
            "sam-pooling",
            clock,
            tick_s=min(_TICK_S, config.keep_alive_interval_s / 4),
            on_tick=self._refresh,
        )
        self._desk = ManifestDesk(
            manifests,
            config,
            block_sizes=block_sizes,
            calls=self._calls,
            wall_clock=wall_clock,
            tell=self._tell,
        )

    # --- look-up ------------------------------------------------------------------

    def lookup(self, chunks: Sequence[Chunk]) -> list[bool | None]:
        """Whether chunks are in the store; ``None`` until it has answered.

        Never ``None`` for longer than the look-up's deadline, and no effect on what
        lives how long: asking is not using.
        """
        shared = self._shared
        now, patience_s = self._clock.now(), self._config.lookup_timeout_s
        with shared.lock:
            asked_at = shared.asked_at
            # Who asks now would wait behind what takes too long already.
            can_wait = asked_at is None or now < asked_at + patience_s
            answers = shared.answers.lookup(chunks, now, can_wait=can_wait)
            must_ask = shared.answers.num_questions and not self._is_asking
            if must_ask:
                self._is_asking = True
        if must_ask:
            self._lookups.submit(self._ask)
        return answers

    def is_known(self, chunk: Chunk) -> bool:
        """Whether the chunk was lately written, read or found here."""
        with self._shared.lock:
            return self._shared.answers.is_there(chunk, self._clock.now())

    def on_written(self, chunks: Sequence[Chunk]) -> None:
        """All ranks have confirmation from the store."""
        with self._shared.lock:
            self._shared.answers.note_there(chunks, self._clock.now())

    def on_missing(self, chunks: Sequence[Chunk]) -> None:
        """A read has found nothing, or nothing of use."""
        with self._shared.lock:
            self._shared.answers.note_missing(chunks, self._clock.now())
            self._shared.tracker.drop_chunks(chunks)

    def on_unreadable(self, chunks: Sequence[Chunk]) -> None:
        """A read has failed for another reason: not to be promised for a while."""
        with self._shared.lock:
            self._shared.answers.note_missing(chunks, self._clock.now())

    # --- sessions -----------------------------------------------------------------

    def track(self, session: SessionKey, chunks: Sequence[Chunk]) -> None:
        """The session has these in the store."""
        shared = self._shared
        with shared.lock:
            for forgotten in shared.tracker.add(session, chunks):
                shared.keep_alive.set_lease(forgotten, 0.0)

    def retain(self, session: SessionKey, wanted: Container[Chunk]) -> None:
        """The session names nothing besides these: the rest is not kept for it."""
        with self._shared.lock:
            self._shared.tracker.retain(session, wanted)

    def set_lease(self, session: SessionKey, expire_at: float) -> None:
        """Keeps the session's values alive until ``expire_at``; 0 for no longer."""
        with self._shared.lock:
            self._shared.keep_alive.set_lease(session, expire_at)

    def num_chunks_of(self, session: SessionKey) -> int:
        with self._shared.lock:
            return self._shared.tracker.num_chunks_of(session)

    def chunks_of(self, session: SessionKey) -> Sequence[Chunk]:
        """What the session is known to have in the store."""
        with self._shared.lock:
            return self._shared.tracker.chunks_of(session)

    def unshared_tail(
        self, session: SessionKey, chunks: Sequence[Chunk]
    ) -> Sequence[Chunk]:
        """What follows the longest prefix that another known session shares."""
        with self._shared.lock:
            return self._shared.tracker.unshared_tail(session, chunks)

    def publish(
        self,
        session: SessionKey,
        contexts: Sequence[ManifestContext],
        *,
        parent: SessionKey | None,
        lease_s: float,
    ) -> int:
        """Writes the session's manifest; one ``Published`` with this ticket follows.

        One for several calls, if they come before the first is written.
        """
        return self._desk.publish(
            self._manifest_key(session), contexts, parent=parent, lease_s=lease_s
        )

    def recall(self, session: SessionKey) -> int:
        """Reads a session's manifest; one ``Recalled`` with this ticket follows."""
        return self._desk.recall(self._manifest_key(session))

    def end(self, session: SessionKey, *, purge_chunks: Sequence[Chunk] = ()) -> int:
        """The session is over, for every instance; one ``Ended`` follows.

        Its values are not kept alive any more. A tombstone keeps a write that is
        older from reviving it.

        Args:
            session: which.
            purge_chunks: to be deleted at once.
        """
        shared = self._shared
        with shared.lock:
            is_known = session in shared.tracker
            shared.keep_alive.set_lease(session, 0.0)
            shared.tracker.remove(session)
            shared.answers.note_missing(purge_chunks, self._clock.now())
            names = [key for chunk in purge_chunks for key in shared.keys.keys(chunk)]
        return self._desk.end(
            self._manifest_key(session),
            is_known=is_known,
            also=lambda: self._delete(names),
        )

    def delete(self, chunks: Sequence[Chunk]) -> None:
        """Deletes values that were being written when they were purged."""
        if not chunks:
            return
        shared = self._shared
        with shared.lock:
            shared.answers.note_missing(chunks, self._clock.now())
            names = [key for chunk in chunks for key in shared.keys.keys(chunk)]
        self._calls.submit(lambda: self._complain(self._delete(names)))

    # --- events -------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def num_open(self) -> int:
        """Answers that are still owed."""
        return self._desk.num_open

    def take_events(self) -> list[PoolEvent]:
        """Returns and clears what was found out."""
        return [self._events.popleft() for _ in range(len(self._events))]

    # --- state --------------------------------------------------------------------

    def clear(self, fingerprint: str | None = None) -> None:
        """All content is void; the names are others from now on, if given."""
        shared = self._shared
        with shared.lock:
            shared.answers.clear()
            shared.tracker.clear()
            shared.keep_alive.clear()
            if fingerprint is not None:
                shared.keys = replace(shared.keys, fingerprint=fingerprint)
        self._desk.clear()

    def stats(self) -> dict[str, int]:
        shared = self._shared
        with shared.lock:
            return {
                "store_sessions": shared.tracker.num_sessions_known,
                "store_values": shared.tracker.num_chunks,
                "store_values_shared": shared.tracker.num_shared,
                "store_values_orphaned": shared.tracker.num_orphaned,
                "store_leases": len(shared.keep_alive),
                "store_calls_open": self._desk.num_open,
                **{
                    f"store_{name}": shared.counts[name] + self._desk.counts[name]
                    for name in _COUNTS
                },
            }

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the accounts disagree. For tests."""
        with self._shared.lock:
            self._shared.tracker.check_integrity()

    def close(self) -> None:
        """Ends the threads; whoever still waits is told. Safe to call again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lookups.close(self._config.call_timeout_s + _MAX_CLOSE_S)
        self._calls.close(self._config.call_timeout_s + _MAX_CLOSE_S)
        self._desk.close()
        self._store.close()

    # --- threads ------------------------------------------------------------------

    def _ask(self) -> None:
        """Answers the look-ups' questions."""
        try:
            self._ask_all()
        finally:
            with self._shared.lock:
                self._is_asking = False
                self._shared.asked_at = None

    def _ask_all(self) -> None:
        shared = self._shared
        # Requests have given up long before; but to connect takes several round trips,
        # and an answer that is late is one for whoever asks next.
        timeout_s = max(self._config.lookup_timeout_s, self._config.call_timeout_s)
        while not self._is_closed:
            with shared.lock:
                names = shared.keys
                chunks = shared.answers.take_questions(self._max_chunks(names))
                generation = shared.answers.generation
                if not chunks:
                    self._is_asking = False
                    return
                shared.asked_at = self._clock.now()
            keys = {chunk: names.keys(chunk) for chunk in chunks}
            found = self._all_done(keys, self._store.exists, timeout_s)
            now = self._clock.now()
            with shared.lock:
                shared.asked_at = None
                missing = [
                    chunk
                    for chunk, is_there in found.items()
                    if shared.answers.answer(chunk, is_there, now, generation)
                    and is_there is False
                ]
                # The store may be another than it was: what is not there is nobody's.
                shared.tracker.drop_chunks(missing)
                shared.counts["lookups"] += len(found)
                shared.counts["lookup_hits"] += sum(map(bool, found.values()))
                failed = sum(is_there is None for is_there in found.values())
                shared.counts["lookups_failed"] += failed

    def _all_done(
        self,
        keys: Mapping[Chunk, Sequence[StoreKey]],
        call: Callable[..., BatchResult],
        timeout_s: float,
    ) -> dict[Chunk, bool | None]:
        """Whether all of a chunk's values are there; ``None`` if that is not known."""
        names = [key for of_chunk in keys.values() for key in of_chunk]
        deadline = time.monotonic() + max(timeout_s, 0.001)
        answers: dict[Chunk, bool | None] = dict.fromkeys(keys)
        try:
            found = call(names, deadline=deadline).outcomes
        except Exception:
            # None that a store may raise; whoever asked is told all the same.
            if not self._has_complained:
                self._has_complained = True
                logger.exception("the store raised an exception; others are not logged")
            return answers
        if len(found) != len(names):
            return answers
        outcomes = iter(found)
        for chunk, of_chunk in keys.items():
            seen = set(itertools.islice(outcomes, len(of_chunk)))
            answers[chunk] = None if Outcome.FAILED in seen else seen == {Outcome.DONE}
        return answers

    def _refresh(self) -> None:
        """Keep-alive: what is due by now, but no more than keeps others waiting."""
        self._tidy()
        for _ in range(_MAX_BATCHES):
            if not self._refresh_batch():
                break
        for _ in range(_MAX_MANIFESTS):
            with self._shared.lock:
                session = self._shared.keep_alive.next_session(self._clock.now())
            if session is None or not self._desk.touch(self._manifest_key(session)):
                return

    def _tidy(self) -> None:
        """Little by little: look-ups want the lock as well."""
        is_untidy = True
        while is_untidy and not self._is_closed:
            with self._shared.lock:
                is_untidy = self._shared.tracker.tidy()
            if is_untidy:
                time.sleep(_PAUSE_S)

    def _refresh_batch(self) -> bool:
        """Returns whether more may be due."""
        shared = self._shared
        now = self._clock.now()
        with shared.lock:
            max_chunks = self._max_chunks(shared.keys)
            chunks = shared.keep_alive.due(now, max_chunks)
            keys = {chunk: shared.keys.keys(chunk) for chunk in chunks}
        if not chunks:
            return False

        def touch(names: Sequence[StoreKey], *, deadline: float) -> BatchResult:
            ttl_s = self._config.ttl_s
            return self._store.touch(names, ttl_s=ttl_s, deadline=deadline)

        found = self._all_done(keys, touch, self._config.call_timeout_s)
        with shared.lock:
            missing = [
                chunk
                for chunk, is_there in found.items()
                if is_there is False and not shared.answers.was_there_since(chunk, now)
            ]
            shared.counts["refreshed"] += sum(map(bool, found.values()))
            shared.counts["refresh_missing"] += len(missing)
            # The store was emptied, or had no room: nothing is there to be kept.
            shared.tracker.drop_chunks(missing)
            shared.answers.note_missing(missing, now)
        return len(chunks) == max_chunks

    def _delete(self, names: Sequence[StoreKey]) -> str | None:
        """Returns why not all of it was deleted."""
        for start in range(0, len(names), self._config.max_batch):
            result = self._store.delete(
                names[start : start + self._config.max_batch],
                deadline=time.monotonic() + self._config.call_timeout_s,
            )
            if Outcome.FAILED in result.outcomes:
                return f"not all values were deleted: {result.error}"
        return None

    # --- internals ----------------------------------------------------------------

    def _complain(self, reason: str | None) -> None:
        if reason is not None:
            logger.warning("a purge is incomplete: %s", reason)

    def _max_chunks(self, keys: KeySpace) -> int:
        """Of one call: what a store has to do is counted in values."""
        return max(1, self._config.max_batch // keys.max_keys)

    def _manifest_key(self, session: SessionKey) -> ManifestKey:
        with self._shared.lock:
            return self._shared.keys.manifest_key(session)

    def _tell(self, event: PoolEvent) -> None:
        self._events.append(event)
        self._wake()


_COUNTS = (
    "lookups",
    "lookup_hits",
    "lookups_failed",
    "refreshed",
    "refresh_missing",
    "manifests_written",
    "manifests_read",
    "manifests_bad",
)
