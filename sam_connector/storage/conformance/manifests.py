"""Checks of manifests: small records that change, of which the newest wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from sam_connector.core.types import SessionKey
from sam_connector.storage.conformance.bench import (
    DONE,
    FAILED,
    LONG_S,
    MISSING,
    PAST_SHORT_S,
    SHORT_S,
    Sleep,
    new_fingerprint,
    soon,
)
from sam_connector.storage.key import ManifestKey
from sam_connector.storage.port import (
    ManifestRead,
    ManifestRecord,
    ManifestStore,
    WriteOutcome,
)

OpenManifests = Callable[[], ManifestStore]

_MAX_BYTES = 1 << 20
#: Versions are milliseconds since 1970 or more, and fit a double.
_NOW = 1_800_000_000_000
_LAST = (1 << 53) - 1


def records_return_as_written(open: OpenManifests, sleep: Sleep) -> None:
    """Any bytes, up to 256 KiB, under any version."""
    with _one(open) as (store, key):
        _expect_read(store, key, None, "never written")
        all_bytes = bytes(range(256))
        data = (b"1", b"\0", b"12:34", all_bytes, b"\r\n$-1\r\n", all_bytes * 1_024)
        for version, each in enumerate(data):
            _write(store, key, version, each)
            _expect_read(store, key, ManifestRecord(version, each), "just written")


def the_newest_version_wins(open: OpenManifests, sleep: Sleep) -> None:
    """The same version is as good as an older one; numbers are not text."""
    outdated = WriteOutcome.OUTDATED
    with _one(open) as (store, key):
        for older, newer in ((9, 10), (99, _NOW), (_NOW + 1, _NOW + 2), (1, _LAST)):
            key = _new_key()
            _write(store, key, newer, b"newer")
            for version in (older, newer, newer - 1, 0):
                _write(store, key, version, b"older", outdated)
                _write(store, key, version, b"", outdated)
            _expect_read(store, key, ManifestRecord(newer, b"newer"), "kept")
        key = _new_key()
        for version in (0, 9, 10, _NOW, _NOW + 1, _LAST - 1, _LAST):
            _write(store, key, version, b"%d" % version)
        _expect_read(store, key, ManifestRecord(_LAST, b"%d" % _LAST), "the last")


def a_tombstone_keeps_older_ones_away(open: OpenManifests, sleep: Sleep) -> None:
    """And a newer one revives the session."""
    with _one(open) as (store, key):
        _write(store, key, 5, b"alive")
        _write(store, key, 6, b"")
        _expect_read(store, key, ManifestRecord(6, b""), "a tombstone")
        for version in (5, 6):
            _write(store, key, version, b"late", WriteOutcome.OUTDATED)
        _expect_read(store, key, ManifestRecord(6, b""), "a tombstone")
        _write(store, key, 7, b"again")
        _expect_read(store, key, ManifestRecord(7, b"again"), "revived")


def records_live_as_long_as_asked(open: OpenManifests, sleep: Sleep) -> None:
    """Then any version may be written, also after a tombstone."""
    with _one(open) as (store, key):
        grave, long = _new_key(), _new_key()
        _write(store, key, 5, b"short", ttl_s=SHORT_S)
        _write(store, grave, 5, b"", ttl_s=0.3)
        _write(store, long, 5, b"long", ttl_s=4 * PAST_SHORT_S)
        sleep(PAST_SHORT_S)
        _expect_read(store, long, ManifestRecord(5, b"long"), "its time is not over")
        for each in (key, grave):
            _expect_read(store, each, None, "its time is over")
            _write(store, each, 1, b"new")
            _expect_read(store, each, ManifestRecord(1, b"new"), "written afterwards")


def touch_lengthens_records_lives(open: OpenManifests, sleep: Sleep) -> None:
    """It never shortens them, and creates none."""
    with _one(open) as (store, key):
        other, nothing = _new_key(), _new_key()
        _write(store, key, 1, b"short", ttl_s=SHORT_S)
        _write(store, other, 1, b"long")
        assert store.touch(key, ttl_s=LONG_S, deadline=soon()) is DONE
        assert store.touch(other, ttl_s=SHORT_S, deadline=soon()) is DONE
        found = store.touch(nothing, ttl_s=LONG_S, deadline=soon())
        assert found is MISSING, f"touch of no manifest: {found}"
        sleep(PAST_SHORT_S)
        _expect_read(store, key, ManifestRecord(1, b"short"), f"touched for {LONG_S} s")
        _expect_read(store, other, ManifestRecord(1, b"long"), f"or for {SHORT_S} s")
        _expect_read(store, nothing, None, "touched, but never written")


def large_records_count_as_missing(open: OpenManifests, sleep: Sleep) -> None:
    with _one(open) as (store, key):
        _write(store, key, 1, b"x" * 1_000)
        read = store.read(key, max_bytes=999, deadline=soon())
        assert read.outcome is MISSING, f"1,000 bytes of at most 999: {read}"
        assert read.record is None, "a record that is too large was returned"
        read = store.read(key, max_bytes=1_000, deadline=soon())
        assert read.outcome is DONE, f"1,000 bytes of at most 1,000: {read}"


def sessions_never_collide(open: OpenManifests, sleep: Sleep) -> None:
    """Names that differ in one part, or could be mistaken for each other."""
    with _one(open) as (store, key):
        fingerprint = key.fingerprint
        sessions = [
            SessionKey(tenant, session_id)
            for tenant in ("", "a", "a:b", "a%3Ab", "ä b", "sam1m")
            for session_id in ("", "a", "b", "a:b", "b:a", "\0", "ä b" * 200, "a\n")
        ]
        keys = [ManifestKey(session, fingerprint) for session in sessions]
        keys.append(ManifestKey(sessions[0], new_fingerprint()))
        for number, each in enumerate(keys):
            _write(store, each, 1, b"%d" % number)
        for number, each in enumerate(keys):
            record = ManifestRecord(1, b"%d" % number)
            _expect_read(store, each, record, f"of {each.session}")


def writers_race_to_the_newest(open: OpenManifests, sleep: Sleep) -> None:
    """Two clients write alternate versions at once; what is last is the newest."""
    with _one(open) as (store, key), closing(open()) as other:

        def write(client: ManifestStore, start: int) -> set[WriteOutcome]:
            return {
                client.write(
                    key,
                    ManifestRecord(version, b"%d" % version),
                    ttl_s=LONG_S,
                    deadline=soon(),
                )
                for version in range(start, 201, 2)
            }

        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(write, (store, other), (1, 2)))
        allowed = {WriteOutcome.DONE, WriteOutcome.OUTDATED}
        assert set().union(*both) <= allowed, f"outcomes of a race: {both}"
        for client in (store, other):
            _expect_read(client, key, ManifestRecord(200, b"200"), "after a race")


def ttls_and_deadlines_are_checked(open: OpenManifests, sleep: Sleep) -> None:
    """No time to live is the caller's mistake; a past deadline is a failure."""
    with _one(open) as (store, key):
        for ttl_s in (0.0, -1.0, math.nan):
            for call in (
                lambda ttl_s: store.write(
                    key, ManifestRecord(1, b"x"), ttl_s=ttl_s, deadline=soon()
                ),
                lambda ttl_s: store.touch(key, ttl_s=ttl_s, deadline=soon()),
            ):
                _expect_value_error(call, ttl_s)
        _expect_all_failed(store, key, time.monotonic() - 1.0, "a past deadline")
        _write(store, key, 1, b"good")
        _expect_read(store, key, ManifestRecord(1, b"good"), "after a past deadline")


def close_ends_the_manifests(open: OpenManifests, sleep: Sleep) -> None:
    """Twice does no harm, and calls fail without raising."""
    store = open()
    key = _new_key()
    _write(store, key, 1, b"x")
    store.close()
    store.close()
    _expect_all_failed(store, key, soon(), "close")
    open().close()


@contextmanager
def _one(open: OpenManifests) -> Iterator[tuple[ManifestStore, ManifestKey]]:
    with closing(open()) as store:
        yield store, _new_key()


def _new_key() -> ManifestKey:
    return ManifestKey(SessionKey("tenant", "session"), new_fingerprint())


def _write(
    store: ManifestStore,
    key: ManifestKey,
    version: int,
    data: bytes,
    outcome: WriteOutcome = WriteOutcome.DONE,
    ttl_s: float = LONG_S,
) -> None:
    record = ManifestRecord(version, data)
    found = store.write(key, record, ttl_s=ttl_s, deadline=soon())
    kind = "a manifest" if data else "a tombstone"
    assert found is outcome, f"{kind} of version {version}: {found}, not {outcome}"


def _expect_read(
    store: ManifestStore, key: ManifestKey, record: ManifestRecord | None, why: str
) -> None:
    read = store.read(key, max_bytes=_MAX_BYTES, deadline=soon())
    wanted = ManifestRead(MISSING if record is None else DONE, record)
    assert read == wanted, f"{why}: {_short(read)}, not {_short(wanted)}"


def _short(read: ManifestRead) -> str:
    if read.record is None:
        return f"{read.outcome} {read.error!r}"
    data = read.record.data
    return f"version {read.record.version}, {len(data)} bytes: {data[:40]!r}"


def _expect_all_failed(
    store: ManifestStore, key: ManifestKey, deadline: float, why: str
) -> None:
    record = ManifestRecord(2, b"y")
    written = store.write(key, record, ttl_s=LONG_S, deadline=deadline)
    assert written is WriteOutcome.FAILED, f"write after {why}: {written}"
    read = store.read(key, max_bytes=_MAX_BYTES, deadline=deadline)
    assert read.outcome is FAILED, f"read after {why}: {read.outcome}"
    assert read.error is not None, f"read failed after {why} and does not say why"
    touched = store.touch(key, ttl_s=LONG_S, deadline=deadline)
    assert touched is FAILED, f"touch after {why}: {touched}"


def _expect_value_error(call: Callable[[float], object], ttl_s: float) -> None:
    try:
        call(ttl_s)
    except ValueError:
        return
    raise AssertionError(f"a manifest for {ttl_s} s raised no ValueError")


CHECKS = (
    records_return_as_written,
    the_newest_version_wins,
    a_tombstone_keeps_older_ones_away,
    records_live_as_long_as_asked,
    touch_lengthens_records_lives,
    large_records_count_as_missing,
    sessions_never_collide,
    writers_race_to_the_newest,
    ttls_and_deadlines_are_checked,
    close_ends_the_manifests,
)
