from __future__ import annotations

from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.errors import SamError
from sam_connector.pooling.manifest import (
    Manifest,
    ManifestContext,
    ManifestError,
    ManifestLimits,
    VersionClock,
    decode,
    encode,
)
from sam_connector.storage.port import MAX_VERSION
from tests.pooling.bench import session
from tests.pooling.pools import GROUP, block_hash, context

LIMITS = ManifestLimits()

GOOD = Manifest(
    session=session("child"),
    contexts=[context(1, 2, 3), context(1, 2, 4, 5)],
    block_sizes={GROUP: 16},
    parent=session("parent"),
    lease_until=1_234.5,
    version=7,
)


def fields_of(manifest: Manifest = GOOD) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(encode(manifest)[8:], strict_map_key=False)
    return fields


def pack(fields: object) -> bytes:
    """As somebody does who knows the format and means no good."""
    body: bytes = msgpack.packb(fields)
    return xxhash.xxh3_64_digest(body) + body


def read(data: bytes, limits: ManifestLimits = LIMITS) -> Manifest:
    return decode(data, session("child"), limits)


def test_what_is_written_can_be_read() -> None:
    assert read(encode(GOOD)) == GOOD


ids = st.text(max_size=20).filter(lambda t: t.isprintable())
hash_lists = st.integers(8, 512).flatmap(
    lambda size: st.lists(
        st.binary(min_size=size, max_size=size).map(BlockHash), max_size=4
    )
)
manifests = st.builds(
    lambda tenant, name, contexts, parent, lease_until, version: Manifest(
        session=SessionKey(tenant, name),
        contexts=contexts,
        block_sizes={GROUP: 16},
        parent=None if parent is None else SessionKey(tenant, parent),
        lease_until=lease_until,
        version=version,
    ),
    ids,
    ids,
    st.lists(
        st.dictionaries(st.integers(0, 9).map(GroupId), hash_lists, max_size=3).map(
            ManifestContext
        ),
        max_size=4,
    ),
    st.none() | ids,
    st.floats(0, 1e12),
    st.integers(0, MAX_VERSION),
)


@given(manifests)
def test_any_manifest_survives_the_store(manifest: Manifest) -> None:
    assert decode(encode(manifest), manifest.session, LIMITS) == manifest


def test_its_size_in_tokens_is_that_of_its_largest_context() -> None:
    assert GOOD.num_tokens == 4 * 16


def test_hashes_that_cannot_be_told_apart_are_not_written() -> None:
    """They are joined; of different lengths they would be read as others."""
    mixed = ManifestContext({GROUP: [block_hash(1), BlockHash(b"x" * 64)]})
    manifest = Manifest(session=session("s"), contexts=[mixed], block_sizes={GROUP: 16})

    with pytest.raises(ManifestError, match="32, 64"):
        encode(manifest)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\0" * 8)
def test_foreign_bytes_are_an_error_of_ours_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ManifestError):
        read(data)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers(0, 99) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(plain)
def test_any_other_data_with_a_right_checksum_is_an_error(value: object) -> None:
    with pytest.raises(ManifestError):
        read(pack(value))


@given(st.sampled_from(sorted(fields_of())), plain)
def test_a_field_that_lies_is_refused_or_harmless(name: str, value: object) -> None:
    """Whatever is read is within the limits, and of the session and its tenant."""
    try:
        manifest = read(pack({**fields_of(), name: value}))
    except ManifestError:
        return
    assert manifest.session == session("child")
    assert manifest.parent is None or manifest.parent.tenant == "t"
    assert 0 <= manifest.version <= MAX_VERSION
    assert 0 <= manifest.lease_until < float("inf")
    for item in manifest.contexts:
        for group_id, hashes in item.hashes.items():
            assert type(group_id) is int
            assert all(8 <= len(block) <= 512 for block in hashes)


@given(st.integers(0, len(encode(GOOD)) - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(position: int, change: int) -> None:
    data = bytearray(encode(GOOD))
    data[position] ^= change

    with pytest.raises(ManifestError):
        read(bytes(data))


@given(st.integers(0, len(encode(GOOD)) - 1))
def test_no_missing_end_goes_unnoticed(length: int) -> None:
    with pytest.raises(ManifestError):
        read(encode(GOOD)[:length])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("tenant", "other"),
        ("session", "other"),
        ("version", -1),
        ("version", True),
        ("version", MAX_VERSION + 1),
        ("version", 1.0),
        ("lease_until", -1.0),
        ("lease_until", float("inf")),
        ("lease_until", float("nan")),
        ("lease_until", 1),
        ("parent", ["other tenant", "parent"]),
        ("parent", ["t"]),
        ("parent", ["t", 5]),
        ("parent", ["t", "x" * 5_000]),
        ("block_sizes", {0: 0}),
        ("block_sizes", {0: True}),
        ("block_sizes", {"a": 16}),
        ("block_sizes", dict.fromkeys(range(65), 16)),
        ("contexts", {}),
        ("contexts", [{0: [32, b"x" * 33]}]),
        ("contexts", [{0: [7, b"x" * 7]}]),
        ("contexts", [{0: [513, b"x" * 513]}]),
        ("contexts", [{0: [0, b""]}]),
        ("contexts", [{0: [-32, b"x" * 32]}]),
        ("contexts", [{0: [32, "x" * 32]}]),
        ("contexts", [{-1: [32, b"x" * 32]}]),
        ("contexts", [{"0": [32, b"x" * 32]}]),
        ("contexts", [[32, b"x" * 32]]),
    ],
)
def test_each_field_is_checked(name: str, value: object) -> None:
    with pytest.raises(ManifestError):
        read(pack({**fields_of(), name: value}))


@pytest.mark.parametrize("name", sorted(fields_of()))
def test_no_field_may_be_missing(name: str) -> None:
    fields = fields_of()
    del fields[name]

    with pytest.raises(ManifestError):
        read(pack(fields))


def test_an_error_is_one_of_the_packages() -> None:
    assert issubclass(ManifestError, SamError)


@pytest.mark.parametrize(
    "limits",
    [
        ManifestLimits(max_bytes=len(encode(GOOD)) - 1),
        ManifestLimits(max_contexts=1),
        ManifestLimits(max_blocks=6),
    ],
)
def test_each_limit_is_kept(limits: ManifestLimits) -> None:
    with pytest.raises(ManifestError):
        read(encode(GOOD), limits)


def test_exactly_as_much_as_the_limits_allow_is_read() -> None:
    limits = ManifestLimits(max_bytes=len(encode(GOOD)), max_contexts=64, max_blocks=7)

    assert read(encode(GOOD), limits) == GOOD


def test_deeply_nested_data_is_an_error() -> None:
    body = b"\x91" * 100_000 + b"\xc0"

    with pytest.raises(ManifestError):
        read(xxhash.xxh3_64_digest(body) + body)


class TestVersionClock:
    def test_follows_the_wall_clock(self) -> None:
        assert VersionClock(10).next(session("s"), 5.0) == 5_000

    def test_every_version_is_later_than_the_one_before(self) -> None:
        clock = VersionClock(10)

        versions = [clock.next(session("s"), now) for now in (5.0, 5.0, 4.0, 5.0, 6.0)]

        assert versions == sorted(set(versions))

    def test_a_clock_that_lags_behind_does_not_make_a_newer_turn_the_older(
        self,
    ) -> None:
        clock = VersionClock(10)
        clock.saw(session("s"), 9_000)

        assert clock.next(session("s"), 1.0) == 9_001

    def test_what_was_seen_of_one_session_is_nothing_to_another(self) -> None:
        clock = VersionClock(10)
        clock.saw(session("a"), 9_000)

        assert clock.next(session("b"), 1.0) == 1_000

    def test_an_older_version_changes_nothing(self) -> None:
        clock = VersionClock(10)
        clock.saw(session("s"), 9_000)
        clock.saw(session("s"), 3)

        assert clock.next(session("s"), 1.0) == 9_001

    def test_never_counts_further_than_a_store_can(self) -> None:
        clock = VersionClock(10)
        clock.saw(session("s"), 1 << 62)

        assert clock.next(session("s"), 1.0) == MAX_VERSION

    def test_remembers_a_bounded_number_of_sessions(self) -> None:
        clock = VersionClock(3)
        for n in range(10):
            clock.saw(session(str(n)), n)

        assert [n for n in range(10) if session(str(n)) in clock] == [7, 8, 9]
        clock.clear()
        assert session("9") not in clock
