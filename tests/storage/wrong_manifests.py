"""Stores of manifests, each wrong in one way."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from typing_extensions import override

from sam_backends.memory import MemoryManifests
from sam_connector.core.types import SessionKey
from sam_connector.storage.key import ManifestKey
from sam_connector.storage.port import (
    ManifestRead,
    ManifestRecord,
    Outcome,
    WriteOutcome,
)

_LONG_S = 3_600.0
_LAST_OF_THE_RACE = 200


class _Writes(MemoryManifests):
    """Changes what is written, or for how long."""

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        return super().write(
            self.change_key(key),
            self.change(record),
            ttl_s=self.change_ttl(ttl_s),
            deadline=deadline,
        )

    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        return super().read(
            self.change_key(key), max_bytes=max_bytes, deadline=deadline
        )

    def change_key(self, key: ManifestKey) -> ManifestKey:
        return key

    def change(self, record: ManifestRecord) -> ManifestRecord:
        return record

    def change_ttl(self, ttl_s: float) -> float:
        return ttl_s


class StripsData(_Writes):
    @override
    def change(self, record: ManifestRecord) -> ManifestRecord:
        return replace(record, data=record.data.strip())


class LivesForEver(_Writes):
    @override
    def change_ttl(self, ttl_s: float) -> float:
        return max(ttl_s, _LONG_S)


class TakesAnyTime(_Writes):
    @override
    def change_ttl(self, ttl_s: float) -> float:
        return ttl_s if ttl_s > 0 else _LONG_S


class KnowsNoTenant(_Writes):
    @override
    def change_key(self, key: ManifestKey) -> ManifestKey:
        return replace(key, session=SessionKey("", key.session.session_id))


class TheLastWins(MemoryManifests):
    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        old = self.read(key, max_bytes=1 << 30, deadline=deadline).record
        if old is not None and self.is_outdated(old, record):
            return WriteOutcome.OUTDATED
        with self._data.lock:
            self._data.remove_manifest(str(key))
        return super().write(key, record, ttl_s=ttl_s, deadline=deadline)

    def is_outdated(self, old: ManifestRecord, new: ManifestRecord) -> bool:
        return False


class TheSameWins(TheLastWins):
    @override
    def is_outdated(self, old: ManifestRecord, new: ManifestRecord) -> bool:
        return old.version > new.version


class ComparesText(TheLastWins):
    @override
    def is_outdated(self, old: ManifestRecord, new: ManifestRecord) -> bool:
        return str(old.version) >= str(new.version)


class ForgetsTombstones(TheLastWins):
    @override
    def is_outdated(self, old: ManifestRecord, new: ManifestRecord) -> bool:
        return old.version >= new.version and not old.is_tombstone


class ReadsThenWrites(TheLastWins):
    """Another's newer version comes between its look and its write."""

    _newest_is_written = threading.Event()

    @override
    def is_outdated(self, old: ManifestRecord, new: ManifestRecord) -> bool:
        if new.version == _LAST_OF_THE_RACE - 1:
            type(self)._newest_is_written.wait(5)
            return False
        return old.version >= new.version

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        outcome = super().write(key, record, ttl_s=ttl_s, deadline=deadline)
        if record.version == _LAST_OF_THE_RACE:
            type(self)._newest_is_written.set()
        return outcome


class TouchesNothing(MemoryManifests):
    @override
    def touch(self, key: ManifestKey, *, ttl_s: float, deadline: float) -> Outcome:
        return self.read(key, max_bytes=1 << 30, deadline=deadline).outcome


class CutsWhatIsLarge(MemoryManifests):
    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        read = super().read(key, max_bytes=1 << 30, deadline=deadline)
        if read.record is None:
            return read
        record = replace(read.record, data=read.record.data[:max_bytes])
        return replace(read, record=record)


class IgnoresDeadlines(MemoryManifests):
    @override
    def touch(self, key: ManifestKey, *, ttl_s: float, deadline: float) -> Outcome:
        return super().touch(key, ttl_s=ttl_s, deadline=time.monotonic() + 60)


class GoesOnAfterClose(MemoryManifests):
    @override
    def close(self) -> None:
        """Nothing."""


#: Each with the check that must notice.
WRONG: list[tuple[type[MemoryManifests], str]] = [
    (StripsData, "records_return_as_written"),
    (TheLastWins, "the_newest_version_wins"),
    (TheSameWins, "the_newest_version_wins"),
    (ComparesText, "the_newest_version_wins"),
    (ForgetsTombstones, "a_tombstone_keeps_older_ones_away"),
    (LivesForEver, "records_live_as_long_as_asked"),
    (TouchesNothing, "touch_lengthens_records_lives"),
    (CutsWhatIsLarge, "large_records_count_as_missing"),
    (KnowsNoTenant, "sessions_never_collide"),
    (ReadsThenWrites, "writers_race_to_the_newest"),
    (TakesAnyTime, "ttls_and_deadlines_are_checked"),
    (IgnoresDeadlines, "ttls_and_deadlines_are_checked"),
    (GoesOnAfterClose, "close_ends_the_manifests"),
]
