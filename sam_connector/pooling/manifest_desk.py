"""Manifests are written, read and ended, by a thread and with retries."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sam_connector.core.types import GroupId, SessionKey
from sam_connector.pooling.calls import CallThread
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.events import Ended, PoolEvent, Published, Recalled
from sam_connector.pooling.manifest import (
    Manifest,
    ManifestContext,
    ManifestError,
    VersionClock,
    decode,
    encode,
)
from sam_connector.storage.key import ManifestKey
from sam_connector.storage.port import (
    MAX_VERSION,
    ManifestRead,
    ManifestRecord,
    ManifestStore,
    Outcome,
    WriteOutcome,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Publication:
    """A manifest that waits to be written; a later one takes its place and ticket."""

    key: ManifestKey
    manifest: Manifest
    ticket: int
    num_attempts: int = 0


class ManifestDesk:
    """Takes calls about manifests from the engine's thread; each has one event.

    Args:
        manifests: where they are; ``None`` if the store keeps none.
        config: settings.
        block_sizes: tokens per block, by group; part of a manifest.
        calls: the thread that makes the calls.
        wall_clock: Unix time, which instances compare.
        tell: takes an event; called from either thread.
    """

    def __init__(
        self,
        manifests: ManifestStore | None,
        config: PoolingConfig,
        *,
        block_sizes: Mapping[GroupId, int],
        calls: CallThread,
        wall_clock: Callable[[], float],
        tell: Callable[[PoolEvent], None],
    ) -> None:
        self._manifests = manifests
        self._config = config
        self._block_sizes = block_sizes
        self._calls = calls
        self._wall_clock = wall_clock
        self._tell = tell
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._publications: dict[SessionKey, _Publication] = {}
        self._open: dict[int, Callable[[str], PoolEvent]] = {}
        self._versions = VersionClock(config.max_versions)
        self._is_closed = False
        self.counts: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Answers that are still owed."""
        return len(self._open) + len(self._publications)

    def publish(
        self,
        key: ManifestKey,
        contexts: Sequence[ManifestContext],
        *,
        parent: SessionKey | None,
        lease_s: float,
    ) -> int:
        """Writes a manifest; one for several calls that come before it is written.

        Those have one ticket, and one answer.
        """
        session, now = key.session, self._wall_clock()
        with self._lock:
            waiting = self._publications.get(session)
            is_new = waiting is None
            ticket = next(self._tickets) if waiting is None else waiting.ticket
            reason = self._refusal() if is_new else None
            if reason is None:
                manifest = Manifest(
                    session=session,
                    contexts=contexts,
                    block_sizes=self._block_sizes,
                    parent=parent,
                    lease_until=now + lease_s if lease_s > 0 else 0.0,
                    version=self._versions.next(session, now),
                )
                self._publications[session] = _Publication(key, manifest, ticket)
        if reason is not None:
            self._tell(Published(session, reason, ticket))
        elif is_new:
            self._calls.submit(lambda: self._write(session))
        return ticket

    def recall(self, key: ManifestKey) -> int:
        """Reads a manifest."""
        return self._call(
            lambda ticket: self._read(ticket, key),
            lambda ticket, reason: Recalled(ticket, None, reason),
        )

    def end(
        self, key: ManifestKey, *, is_known: bool, also: Callable[[], str | None]
    ) -> int:
        """Puts a tombstone in a manifest's place.

        Args:
            key: of the session that is over.
            is_known: there certainly is something to end.
            also: made from the thread after it; returns what went wrong.
        """
        with self._lock:
            version = self._versions.next(key.session, self._wall_clock())

        def end(ticket: int) -> Ended:
            ended = self._bury(ticket, key, version, is_known=is_known)
            reason = also()
            return (
                ended if ended.reason or not reason else replace(ended, reason=reason)
            )

        return self._call(end, lambda ticket, reason: Ended(ticket, is_known, reason))

    def touch(self, key: ManifestKey) -> bool:
        """Lets a manifest live on; to be called by the thread.

        Returns:
            Whether the store has answered.
        """
        if self._manifests is None:
            return False
        outcome = self._manifests.touch(
            key, ttl_s=self._config.manifest_ttl_s, deadline=self._deadline()
        )
        return outcome is not Outcome.FAILED

    def clear(self) -> None:
        """What was known of versions is void."""
        with self._lock:
            self._versions.clear()

    def close(self) -> None:
        """Whoever still waits is told; the thread has ended before."""
        with self._lock:
            self._is_closed = True
            publications = list(self._publications.values())
            waiting = list(self._open.values())
            self._publications.clear()
            self._open.clear()
        reason = "the engine ends"
        for publication in publications:
            session = publication.manifest.session
            self._tell(Published(session, reason, publication.ticket))
        for refuse in waiting:
            self._tell(refuse(reason))
        if self._manifests is not None:
            self._manifests.close()

    # --- calls --------------------------------------------------------------------

    def _refusal(self) -> str | None:
        if self._is_closed:
            return "the engine ends"
        if self.num_open >= self._config.max_open:
            return f"{self._config.max_open} calls are waiting for the store"
        return None

    def _call(
        self,
        make: Callable[[int], PoolEvent],
        refuse: Callable[[int, str], PoolEvent],
    ) -> int:
        """Has a call made by the thread, or tells at once why not."""
        ticket = next(self._tickets)
        with self._lock:
            reason = self._refusal()
            if reason is None:
                self._open[ticket] = lambda reason: refuse(ticket, reason)
        if reason is not None:
            self._tell(refuse(ticket, reason))
            return ticket

        def call() -> None:
            try:
                event = make(ticket)
            except Exception as error:
                logger.exception("a call about a manifest went wrong")
                event = refuse(ticket, repr(error))
            with self._lock:
                is_owed = self._open.pop(ticket, None) is not None
            if is_owed:
                self._tell(event)

        self._calls.submit(call)
        return ticket

    # --- on the thread ------------------------------------------------------------

    def _write(self, session: SessionKey) -> None:
        with self._lock:
            publication = self._publications.get(session)
        if publication is None:
            return  # the session has ended meanwhile
        publication.num_attempts += 1
        try:
            reason = self._write_once(publication)
        except Exception as error:
            logger.exception("a manifest could not be written")
            reason = repr(error)
        is_last = (
            reason is None or publication.num_attempts >= self._config.max_attempts
        )
        with self._lock:
            is_current = self._publications.get(session) is publication
            if is_current and is_last:
                del self._publications[session]
        if is_current and is_last:
            self._tell(Published(session, reason, publication.ticket))
            return
        # A later turn's took its place meanwhile, or it is tried again.
        delay_s = self._config.retry_s * 2 ** (publication.num_attempts - 1)
        self._calls.submit(lambda: self._write(session), delay_s if is_current else 0.0)

    def _write_once(self, publication: _Publication) -> str | None:
        if self._manifests is None:
            return None
        data = encode(publication.manifest)
        if len(data) > self._config.manifest.max_bytes:
            return f"it has {len(data)} bytes"
        outcome = self._manifests.write(
            publication.key,
            ManifestRecord(publication.manifest.version, data),
            ttl_s=self._config.manifest_ttl_s,
            deadline=self._deadline(),
        )
        self.counts["manifests_written"] += outcome is WriteOutcome.DONE
        if outcome is WriteOutcome.OUTDATED:
            # By a clock ahead of ours, perhaps: the next turn must be the later one.
            read = self._read_record(publication.key)
            if read.record is not None and not self._is_usable(
                publication.key, read.record
            ):
                self._outrun(publication.key.session, read.record.version)
                return "what is there instead is not usable"
        # What a newer turn has written, or the session's end, is what others should
        # see.
        if outcome in (WriteOutcome.DONE, WriteOutcome.OUTDATED):
            return None
        return "the store is full" if outcome is WriteOutcome.FULL else "no answer"

    def _read_record(self, key: ManifestKey) -> ManifestRead:
        assert self._manifests is not None
        read = self._manifests.read(
            key, max_bytes=self._config.manifest.max_bytes, deadline=self._deadline()
        )
        if read.record is not None:
            with self._lock:
                self._versions.saw(key.session, read.record.version)
        return read

    def _read(self, ticket: int, key: ManifestKey) -> Recalled:
        if self._manifests is None:
            return Recalled(ticket)
        read = self._read_record(key)
        if read.outcome is Outcome.FAILED:
            return Recalled(ticket, reason=f"the store: {read.error}")
        if read.record is None or read.record.is_tombstone:
            return Recalled(ticket)
        try:
            manifest = self._decode(key, read.record)
            self._check_groups(manifest)
        except ManifestError as error:
            logger.warning("a manifest in the store is not usable: %s", error)
            self.counts["manifests_bad"] += 1
            return Recalled(ticket, reason=f"its manifest is not usable: {error}")
        self.counts["manifests_read"] += 1
        return Recalled(ticket, manifest)

    def _bury(
        self, ticket: int, key: ManifestKey, version: int, *, is_known: bool
    ) -> Ended:
        with self._lock:
            # What was to be published before is over as well; a turn after it is not.
            publication = self._publications.get(key.session)
            if publication is not None and publication.manifest.version < version:
                del self._publications[key.session]
            else:
                publication = None
        if publication is not None:
            self._tell(
                Published(key.session, "the session has ended", publication.ticket)
            )
        if self._manifests is None:
            return Ended(ticket, is_known)
        read = self._read_record(key)
        is_there = read.record is not None and not read.record.is_tombstone
        if not (is_known or is_there or read.outcome is Outcome.FAILED):
            return Ended(ticket)
        reason: str | None = "the store did not take the session's end"
        for _ in range(self._config.max_attempts):
            if read.record is not None:
                version = min(MAX_VERSION, max(version, read.record.version + 1))
            self._outrun(key.session, version)
            outcome = self._manifests.write(
                key,
                ManifestRecord(version, b""),
                ttl_s=self._config.tombstone_ttl_s,
                deadline=self._deadline(),
            )
            if outcome is WriteOutcome.DONE:
                reason = None
            if outcome is not WriteOutcome.OUTDATED:
                break
            read = self._read_record(key)
            if read.record is not None and read.record.is_tombstone:
                reason = None  # another's, and as good
                break
        return Ended(ticket, is_known or is_there, reason)

    def _decode(self, key: ManifestKey, record: ManifestRecord) -> Manifest:
        """Raises ``ManifestError`` as ``decode``, or if the version is another."""
        manifest = decode(record.data, key.session, self._config.manifest)
        if manifest.version != record.version:
            raise ManifestError(f"version {manifest.version} as {record.version}")
        return manifest

    def _is_usable(self, key: ManifestKey, record: ManifestRecord) -> bool:
        """Whether it is a manifest or a tombstone."""
        try:
            return record.is_tombstone or bool(self._decode(key, record))
        except ManifestError:
            return False

    def _outrun(self, session: SessionKey, version: int) -> None:
        """A turn after the end stays the later one, whatever the end's version is."""
        with self._lock:
            self._versions.saw(session, version)
            publication = self._publications.get(session)
            if publication is not None and publication.manifest.version <= version:
                publication.manifest = replace(
                    publication.manifest,
                    version=self._versions.next(session, self._wall_clock()),
                )

    def _check_groups(self, manifest: Manifest) -> None:
        for context in manifest.contexts:
            for group_id in context.hashes:
                if group_id not in self._block_sizes:
                    raise ManifestError(f"there is no group {group_id} here")

    def _deadline(self) -> float:
        return time.monotonic() + self._config.call_timeout_s
