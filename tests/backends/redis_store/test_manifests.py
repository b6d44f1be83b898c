"""Manifests on the server: what is no record never stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from sam_backends.redis_store import open_store
from sam_connector.pooling.manifest import ManifestLimits
from sam_connector.storage.port import (
    MAX_VERSION,
    ManifestRead,
    ManifestRecord,
    ManifestStore,
    Outcome,
    WriteOutcome,
)
from tests.backends.builders import OPTIONS, make_manifest_key, soon
from tests.backends.servers import Server

_KEY = make_manifest_key()


@pytest.fixture
def plain(own_redis: Server) -> Iterator[ManifestStore]:
    manifests = open_store(own_redis.url, OPTIONS).manifests
    assert manifests is not None
    with closing(manifests):
        yield manifests


@pytest.mark.parametrize(
    "garbage",
    [b"", b"x", b"z" * 30, b"9" * 19, b"9" * 19 + b"x", b"\xff" * 40, b"9" * 25],
)
def test_garbage_is_missing_and_written_over(
    own_redis: Server, plain: ManifestStore, garbage: bytes
) -> None:
    own_redis.do("SET", str(_KEY), garbage)
    read = plain.read(_KEY, max_bytes=1_000, deadline=soon())
    assert read == ManifestRead(Outcome.MISSING)
    record = ManifestRecord(1, b"right")
    written = plain.write(_KEY, record, ttl_s=9, deadline=soon())
    assert written is WriteOutcome.DONE
    read = plain.read(_KEY, max_bytes=1_000, deadline=soon())
    assert read == ManifestRead(Outcome.DONE, record)
    assert 0 < own_redis.do("PTTL", str(_KEY)) <= 9_000


def test_another_type_under_our_name_is_written_over(
    own_redis: Server, plain: ManifestStore
) -> None:
    own_redis.do("LPUSH", str(_KEY), "x")
    assert plain.read(_KEY, max_bytes=9, deadline=soon()).outcome is Outcome.MISSING
    record = ManifestRecord(1, b"right")
    written = plain.write(_KEY, record, ttl_s=9, deadline=soon())
    assert written is WriteOutcome.DONE


@pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 10**20])
def test_versions_have_bounds(plain: ManifestStore, version: int) -> None:
    with pytest.raises(ValueError, match="version"):
        plain.write(_KEY, ManifestRecord(version, b"x"), ttl_s=9, deadline=soon())


def test_the_largest_manifest_can_be_read(plain: ManifestStore) -> None:
    largest = ManifestLimits().max_bytes
    for num_bytes, outcome in (
        (largest, Outcome.DONE),
        (largest + 1, Outcome.MISSING),
    ):
        record = ManifestRecord(num_bytes, bytes(num_bytes))
        written = plain.write(_KEY, record, ttl_s=9, deadline=soon())
        assert written is WriteOutcome.DONE
        read = plain.read(_KEY, max_bytes=largest, deadline=soon())
        assert (read.outcome, read.error) == (outcome, None)


def test_a_large_record_is_not_transferred(
    own_redis: Server, plain: ManifestStore
) -> None:
    """At most one byte more than was allowed."""
    own_redis.do("SET", str(_KEY), b"1" * (64 << 20))
    before = own_redis.do("INFO", "stats")["total_net_output_bytes"]
    read = plain.read(_KEY, max_bytes=1_000, deadline=soon())
    assert read.outcome is Outcome.MISSING
    after = own_redis.do("INFO", "stats")["total_net_output_bytes"]
    assert after - before < 1 << 20
