"""The session-aware pooling manager: sessions and their values in a store."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sam_connector.core.clock import Clock
from sam_connector.core.types import GroupId, SessionKey
from sam_connector.pooling.calls import CallThread
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.keep_alive import KeepAlive
from sam_connector.pooling.key_space import Chunk, KeySpace
from sam_connector.pooling.lookup import ExistenceCache
from sam_connector.pooling.manifest import (
    Manifest,
    ManifestContext,
    ManifestError,
    decode,
    encode,
    next_version,
)
from sam_connector.pooling.tracker import SessionKeyTracker
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import (
    BatchResult,
    ManifestRecord,
    ManifestStore,
    Outcome,
    StoreBackend,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

#: At least so often it is looked whether values are due to be refreshed.
_TICK_S = 0.25

_MAX_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Published:
    """A session's manifest was written, or ``reason`` says why not."""

    session: SessionKey
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Recalled:
    """A manifest was read; with neither manifest nor reason there is none."""

    ticket: int
    manifest: Manifest | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A session is over; ``reason`` says why nobody knows whether there was one."""

    ticket: int
    found: bool = False
    reason: str | None = None


PoolEvent = Published | Recalled | Ended


@dataclass(slots=True)
class _Publication:
    """A manifest that waits to be written; a later one takes its place."""

    manifest: Manifest
    num_attempts: int = 0


@dataclass(slots=True)
class _Shared:
    """What the engine's thread and ours both use, under ``lock``."""

    tracker: SessionKeyTracker
    keep_alive: KeepAlive
    answers: ExistenceCache
    keys: KeySpace
    lock: threading.Lock = field(default_factory=threading.Lock)
    events: deque[PoolEvent] = field(default_factory=deque)
    publications: dict[SessionKey, _Publication] = field(default_factory=dict)
    #: Versions of manifests, as last seen or written.
    versions: dict[SessionKey, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


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
        self._manifests = manifests
        self._config = config
        self._block_sizes = block_sizes
        self._clock = clock
        self._wall_clock = wall_clock
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
        self._tickets = itertools.count(1)
        self._num_open = 0
        self._is_asking = False
        self._is_closed = False
        self._lookups = CallThread(
            "sam-lookup", clock, tick_s=_MAX_CLOSE_S, on_tick=lambda: None
        )
        self._calls = CallThread(
            "sam-pooling",
            clock,
            tick_s=min(_TICK_S, config.keep_alive_interval_s / 4),
            on_tick=self._refresh,
        )

    # --- look-up ------------------------------------------------------------------

    def lookup(self, chunks: Sequence[Chunk]) -> list[bool | None]:
        """Whether chunks are in the store; ``None`` until it has answered.

        Never ``None`` for longer than the look-up's deadline, and no effect on what
        lives how long: asking is not using.
        """
        shared = self._shared
        with shared.lock:
            answers = shared.answers.lookup(chunks, self._clock.now())
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

    # --- sessions -----------------------------------------------------------------

    def track(self, session: SessionKey, chunks: Sequence[Chunk]) -> None:
        """The session has these in the store."""
        shared = self._shared
        with shared.lock:
            for forgotten in shared.tracker.add(session, chunks):
                shared.keep_alive.set_lease(forgotten, 0.0)
                shared.versions.pop(forgotten, None)

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
    ) -> None:
        """Writes the session's manifest; one ``Published`` follows.

        One for several calls, if they come before the first is written.
        """
        shared = self._shared
        now = self._wall_clock()
        with shared.lock:
            version = next_version(shared.versions.get(session, 0), now)
            shared.versions[session] = version
            manifest = Manifest(
                session=session,
                contexts=contexts,
                block_sizes=self._block_sizes,
                parent=parent,
                lease_until=now + lease_s if lease_s > 0 else 0.0,
                version=version,
            )
            is_new = session not in shared.publications
            reason = self._refusal() if is_new else None
            if reason is None:
                shared.publications[session] = _Publication(manifest)
                self._num_open += is_new
        if reason is not None:
            self._tell(Published(session, reason))
        elif is_new:
            self._calls.submit(lambda: self._write(session))

    def recall(self, session: SessionKey) -> int:
        """Reads a session's manifest; one ``Recalled`` with this ticket follows."""
        ticket = next(self._tickets)
        self._call(
            lambda: self._read(ticket, session),
            lambda reason: Recalled(ticket, None, reason),
        )
        return ticket

    def end(self, session: SessionKey, *, purge_chunks: Sequence[Chunk] = ()) -> int:
        """The session is over, for every instance; one ``Ended`` follows.

        Its values are not kept alive any more. A tombstone keeps a write that is
        older from reviving it.

        Args:
            session: which.
            purge_chunks: to be deleted at once.
        """
        shared = self._shared
        ticket = next(self._tickets)
        with shared.lock:
            is_known = session in shared.tracker or session in shared.versions
            shared.keep_alive.set_lease(session, 0.0)
            shared.tracker.remove(session)
            version = next_version(shared.versions.pop(session, 0), self._wall_clock())
            shared.answers.note_missing(purge_chunks, self._clock.now())
            names = [key for chunk in purge_chunks for key in shared.keys.keys(chunk)]
        self._call(
            lambda: self._bury(ticket, session, version, is_known, names),
            lambda reason: Ended(ticket, is_known, reason),
        )
        return ticket

    # --- events -------------------------------------------------------------------

    @property
    def has_events(self) -> bool:
        return bool(self._shared.events)

    @property
    def num_open(self) -> int:
        """Answers that are still owed."""
        return self._num_open

    def take_events(self) -> list[PoolEvent]:
        """Returns and clears what was found out."""
        events = self._shared.events
        return [events.popleft() for _ in range(len(events))]

    # --- state --------------------------------------------------------------------

    def clear(self, fingerprint: str | None = None) -> None:
        """All content is void; the names are others from now on, if given."""
        shared = self._shared
        with shared.lock:
            shared.answers.clear()
            shared.tracker.clear()
            shared.keep_alive.clear()
            shared.versions.clear()
            if fingerprint is not None:
                keys = shared.keys
                shared.keys = KeySpace(
                    tenant=keys.tenant,
                    fingerprint=fingerprint,
                    num_ranks=keys.num_ranks,
                    num_parts=keys.num_parts,
                )

    def stats(self) -> dict[str, int]:
        shared = self._shared
        with shared.lock:
            return {
                "store_sessions": shared.tracker.num_sessions_known,
                "store_values": shared.tracker.num_chunks,
                "store_values_shared": shared.tracker.num_shared,
                "store_values_orphaned": shared.tracker.num_orphaned,
                "store_leases": len(shared.keep_alive),
                "store_calls_open": self._num_open,
                **{f"store_{name}": shared.counts[name] for name in _COUNTS},
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
        with self._shared.lock:
            sessions = list(self._shared.publications)
            self._shared.publications.clear()
        for session in sessions:
            self._tell(Published(session, "the engine ends"))
        self._store.close()
        if self._manifests is not None:
            self._manifests.close()

    # --- threads ------------------------------------------------------------------

    def _ask(self) -> None:
        """Answers the look-ups' questions."""
        try:
            self._ask_all()
        finally:
            with self._shared.lock:
                self._is_asking = False

    def _ask_all(self) -> None:
        shared = self._shared
        while not self._is_closed:
            with shared.lock:
                chunks = shared.answers.take_questions(self._config.max_batch)
                generation = shared.answers.generation
                if not chunks:
                    self._is_asking = False
                    return
                keys = {chunk: shared.keys.keys(chunk) for chunk in chunks}
            found = self._all_done(
                keys, self._store.exists, self._config.lookup_timeout_s
            )
            now = self._clock.now()
            with shared.lock:
                for chunk, is_there in found.items():
                    shared.answers.answer(chunk, is_there, now, generation)
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
        outcomes = iter(call(names, deadline=deadline).outcomes)
        answers: dict[Chunk, bool | None] = {}
        for chunk, of_chunk in keys.items():
            seen = set(itertools.islice(outcomes, len(of_chunk)))
            answers[chunk] = None if Outcome.FAILED in seen else seen == {Outcome.DONE}
        return answers

    def _refresh(self) -> None:
        """Keep-alive: what is due by now."""
        shared = self._shared
        now = self._clock.now()
        with shared.lock:
            chunks = shared.keep_alive.due(now, self._config.max_batch)
            keys = {chunk: shared.keys.keys(chunk) for chunk in chunks}
        if not chunks:
            return

        def touch(names: Sequence[StoreKey], *, deadline: float) -> BatchResult:
            ttl_s = self._config.ttl_s
            return self._store.touch(names, ttl_s=ttl_s, deadline=deadline)

        found = self._all_done(keys, touch, self._config.call_timeout_s)
        missing = [chunk for chunk, is_there in found.items() if is_there is False]
        with shared.lock:
            shared.counts["refreshed"] += sum(map(bool, found.values()))
            shared.counts["refresh_missing"] += len(missing)
            # The store was emptied, or had no room: nothing is there to be kept.
            shared.tracker.drop_chunks(missing)
            shared.answers.note_missing(missing, now)

    def _write(self, session: SessionKey) -> None:
        shared = self._shared
        with shared.lock:
            publication = shared.publications.get(session)
            key = shared.keys.manifest_key(session)
        if publication is None:
            return
        manifest = publication.manifest
        publication.num_attempts += 1
        try:
            reason = self._write_manifest(key, manifest)
        except Exception as error:
            logger.exception("a call to the store went wrong")
            reason = repr(error)
        is_last = (
            reason is None or publication.num_attempts >= self._config.max_attempts
        )
        with shared.lock:
            current = shared.publications.get(session)
            is_current = current is publication
            if is_current and is_last:
                del shared.publications[session]
        if not is_current:
            # A later turn's took its place meanwhile.
            self._calls.submit(lambda: self._write(session))
        elif is_last:
            self._finish(Published(session, reason))
        else:
            delay_s = self._config.retry_s * 2 ** (publication.num_attempts - 1)
            self._calls.submit(lambda: self._write(session), delay_s)

    def _write_manifest(self, key: object, manifest: Manifest) -> str | None:
        if self._manifests is None:
            return None
        data = encode(manifest)
        if len(data) > self._config.manifest.max_bytes:
            return f"it has {len(data)} bytes"
        outcome = self._manifests.write(
            key,  # type: ignore[arg-type]
            ManifestRecord(manifest.version, data),
            ttl_s=self._config.manifest_ttl_s,
            deadline=time.monotonic() + self._config.call_timeout_s,
        )
        self._shared.counts["manifests_written"] += outcome is WriteOutcome.DONE
        # A newer turn's manifest, or the session's end, is what others should see.
        if outcome in (WriteOutcome.DONE, WriteOutcome.OUTDATED):
            return None
        return "the store is full" if outcome is WriteOutcome.FULL else "no answer"

    def _read(self, ticket: int, session: SessionKey) -> Recalled:
        if self._manifests is None:
            return Recalled(ticket)
        shared = self._shared
        with shared.lock:
            key = shared.keys.manifest_key(session)
        read = self._manifests.read(
            key,
            max_bytes=self._config.manifest.max_bytes,
            deadline=time.monotonic() + self._config.call_timeout_s,
        )
        if read.record is not None:
            with shared.lock:
                version = max(shared.versions.get(session, 0), read.record.version)
                shared.versions[session] = version
        if read.outcome is Outcome.FAILED:
            return Recalled(ticket, reason=f"the store: {read.error}")
        if read.record is None or read.record.is_tombstone:
            return Recalled(ticket)
        try:
            manifest = decode(read.record.data, session, self._config.manifest)
        except ManifestError as error:
            logger.warning("a manifest in the store is not usable: %s", error)
            shared.counts["manifests_bad"] += 1
            return Recalled(ticket, reason=f"its manifest is not usable: {error}")
        shared.counts["manifests_read"] += 1
        return Recalled(ticket, manifest)

    def _bury(
        self,
        ticket: int,
        session: SessionKey,
        version: int,
        is_known: bool,
        purge: Sequence[StoreKey],
    ) -> Ended:
        shared = self._shared
        reason = None
        if self._manifests is not None:
            with shared.lock:
                # What was to be published is over as well.
                publication = shared.publications.pop(session, None)
                key = shared.keys.manifest_key(session)
            if publication is not None:
                self._finish(Published(session, "the session has ended"))
            deadline = time.monotonic() + self._config.call_timeout_s
            read = self._manifests.read(
                key, max_bytes=self._config.manifest.max_bytes, deadline=deadline
            )
            is_known |= read.outcome is Outcome.DONE and not (
                read.record is not None and read.record.is_tombstone
            )
            if read.record is not None:
                version = max(version, read.record.version + 1)
            if is_known or read.outcome is Outcome.FAILED:
                outcome = self._manifests.write(
                    key,
                    ManifestRecord(version, b""),
                    ttl_s=self._config.tombstone_ttl_s,
                    deadline=deadline,
                )
                if outcome in (WriteOutcome.FULL, WriteOutcome.FAILED):
                    reason = "the store did not take the session's end"
        for start in range(0, len(purge), self._config.max_batch):
            self._store.delete(
                purge[start : start + self._config.max_batch],
                deadline=time.monotonic() + self._config.call_timeout_s,
            )
        return Ended(ticket, is_known, reason)

    # --- internals ----------------------------------------------------------------

    def _refusal(self) -> str | None:
        if self._is_closed:
            return "the engine ends"
        if self._num_open >= self._config.max_open:
            return f"{self._config.max_open} calls are waiting for the store"
        return None

    def _call(
        self,
        make: Callable[[], PoolEvent],
        refuse: Callable[[str], PoolEvent],
    ) -> None:
        """Has a call made by our thread, or tells at once why not."""
        with self._shared.lock:
            reason = self._refusal()
            if reason is None:
                self._num_open += 1
        if reason is not None:
            self._tell(refuse(reason))
            return

        def call() -> None:
            try:
                event = make()
            except Exception as error:
                logger.exception("a call to the store went wrong")
                event = refuse(repr(error))
            self._finish(event)

        self._calls.submit(call)

    def _finish(self, event: PoolEvent) -> None:
        with self._shared.lock:
            self._num_open -= 1
        self._tell(event)

    def _tell(self, event: PoolEvent) -> None:
        self._shared.events.append(event)
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
