"""The reference store keeps the contract, and its own bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sam_backends.memory import (
    MemoryData,
    MemoryManifests,
    MemoryStore,
    open_store,
)
from sam_connector.core.clock import ManualClock
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.errors import ConfigurationError, StoreFull
from sam_connector.storage.conformance import BLOCK_CHECKS, MANIFEST_CHECKS
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    Entry,
    ManifestRecord,
    Outcome,
    WriteOutcome,
)
from sam_connector.storage.registry import StoreOptions


def key(index: int) -> StoreKey:
    block_hash = BlockHash(index.to_bytes(32, "big"))
    return StoreKey("", "ab" * 16, GroupId(0), 0, block_hash)


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.mark.parametrize("check", BLOCK_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_for_blocks(check: Callable[..., None]) -> None:
    data = MemoryData()
    check(lambda: MemoryStore(data), time.sleep)


@pytest.mark.parametrize("check", MANIFEST_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_for_manifests(check: Callable[..., None]) -> None:
    data = MemoryData()
    check(lambda: MemoryManifests(data), time.sleep)


def test_what_was_used_least_recently_goes_first() -> None:
    store = MemoryStore(MemoryData(max_bytes=300))
    for index in range(3):
        store.put(
            [Entry(key(index), [memoryview(bytes(100))])], ttl_s=9, deadline=soon()
        )
    store.get([Entry(key(0), [memoryview(bytearray(100))])], deadline=soon())
    store.put([Entry(key(3), [memoryview(bytes(100))])], ttl_s=9, deadline=soon())
    found = store.exists([key(index) for index in range(4)], deadline=soon())
    assert found.outcomes == [
        Outcome.DONE,
        Outcome.MISSING,
        Outcome.DONE,
        Outcome.DONE,
    ]


def test_touch_is_use_and_exists_is_not() -> None:
    store = MemoryStore(MemoryData(max_bytes=300))
    for index in range(3):
        entry = Entry(key(index), [memoryview(bytes(100))])
        store.put([entry], ttl_s=9, deadline=soon())
    store.touch([key(0)], ttl_s=1, deadline=soon())
    store.exists([key(1)], deadline=soon())
    store.put([Entry(key(3), [memoryview(bytes(200))])], ttl_s=9, deadline=soon())
    found = store.exists([key(index) for index in range(4)], deadline=soon())
    assert found.outcomes == [
        Outcome.DONE,
        Outcome.MISSING,
        Outcome.MISSING,
        Outcome.DONE,
    ]


def test_a_value_that_exceeds_the_bound_is_refused_and_nothing_displaced() -> None:
    store = MemoryStore(MemoryData(max_bytes=100))
    store.put([Entry(key(0), [memoryview(bytes(50))])], ttl_s=9, deadline=soon())
    large = Entry(key(1), [memoryview(bytes(101))])
    result = store.put([large], ttl_s=9, deadline=soon())
    assert result.outcomes == [Outcome.FULL]
    assert isinstance(result.error, StoreFull)
    assert store.exists([key(0)], deadline=soon()).outcomes == [Outcome.DONE]


def test_time_may_be_another_s() -> None:
    clock = ManualClock()
    store = MemoryStore(MemoryData(now=clock.now))
    store.put([Entry(key(0), [memoryview(b"x")])], ttl_s=10, deadline=soon())
    clock.set(9.9)
    assert store.exists([key(0)], deadline=soon()).outcomes == [Outcome.DONE]
    clock.set(10.0)
    assert store.exists([key(0)], deadline=soon()).outcomes == [Outcome.MISSING]


def test_stores_of_one_name_are_one_and_others_are_not() -> None:
    one, same = (open_store("memory://shared-by-two", StoreOptions()) for _ in "ab")
    unnamed = open_store("memory://", StoreOptions())
    one.blocks.put([Entry(key(7), [memoryview(b"x")])], ttl_s=9, deadline=soon())
    assert same.blocks.exists([key(7)], deadline=soon()).outcomes == [Outcome.DONE]
    missing = unnamed.blocks.exists([key(7)], deadline=soon())
    assert missing.outcomes == [Outcome.MISSING]


def write(
    manifests: MemoryManifests, name: str, version: int, num_bytes: int, ttl_s: float
) -> WriteOutcome:
    return manifests.write(
        ManifestKey(SessionKey("", name), "ab" * 16),
        ManifestRecord(version, bytes(num_bytes)),
        ttl_s=ttl_s,
        deadline=soon(),
    )


def test_manifests_have_a_bound_too_and_are_not_put_out() -> None:
    manifests = MemoryManifests(MemoryData(max_bytes=500))
    assert write(manifests, "a", 1, 300, 9) is WriteOutcome.DONE
    assert write(manifests, "b", 1, 300, 9) is WriteOutcome.FULL
    assert write(manifests, "a", 2, 301, 9) is WriteOutcome.DONE
    assert write(manifests, "a", 3, 501, 9) is WriteOutcome.FULL
    key = ManifestKey(SessionKey("", "a"), "ab" * 16)
    read = manifests.read(key, max_bytes=500, deadline=soon())
    assert read.record == ManifestRecord(2, bytes(301))


def test_manifests_whose_time_is_over_leave_their_room() -> None:
    clock = ManualClock()
    data = MemoryData(max_bytes=10_000, now=clock.now)
    manifests = MemoryManifests(data)
    for turn in range(1_000):
        assert write(manifests, f"s{turn}", 1, 0, 10) is WriteOutcome.DONE
        clock.advance(1)
    assert len(data.manifests) < 100


def test_a_value_written_again_counts_once() -> None:
    data = MemoryData(max_bytes=300)
    store = MemoryStore(data)
    for size in (200, 100, 250):
        entry = Entry(key(0), [memoryview(bytes(size))])
        assert store.put([entry], ttl_s=9, deadline=soon()).outcomes == [Outcome.DONE]
        assert data.num_bytes == size
    store.delete([key(0)], deadline=soon())
    assert data.num_bytes == 0


def test_a_url_that_cannot_be_read_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="Invalid"):
        open_store("memory://[", StoreOptions())


@pytest.mark.parametrize("query", ["max_bytes=lots", "size=1", "max_bytes="])
def test_a_bad_url_says_what_is_wrong(query: str) -> None:
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        open_store(f"memory://?{query}", StoreOptions())


def test_a_size_with_a_unit_is_the_bound() -> None:
    opened: Any = open_store("memory://?max_bytes=2MiB", StoreOptions()).blocks
    assert opened.capabilities.max_value_bytes == 2 << 20
