"""What blocks look like on the server, and what changes them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from sam_backends.embedded import EmbeddedServer
from sam_backends.redis_store import open_store
from sam_backends.redis_store.blocks import millis
from sam_connector.storage.port import Outcome, StoreBackend
from tests.backends.builders import OPTIONS, make_key, make_keys, soon, source, sources
from tests.backends.fault_proxy import Fault, FaultProxy
from tests.backends.servers import Server

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


@pytest.fixture
def plain(own_redis: Server) -> Iterator[StoreBackend]:
    with closing(open_store(own_redis.url, OPTIONS).blocks) as store:
        yield store


@pytest.mark.parametrize(
    ("ttl_s", "expected"),
    [(1e-9, 1), (0.0004, 1), (0.4, 400), (1, 1_000), (300.7, 300_700), (2.0001, 2_001)],
)
def test_lives_are_rounded_up(ttl_s: float, expected: int) -> None:
    assert millis(ttl_s) == expected


@pytest.mark.parametrize("ttl_s", [0, -1, math.nan, math.inf])
def test_lives_end(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        millis(ttl_s)


def test_only_what_should_changes_the_order_of_eviction(
    own_redis: Server, plain: StoreBackend
) -> None:
    """``touch`` does, also of keys that live longer anyway; ``exists`` does not."""
    keys = make_keys(3)
    plain.put(sources(keys), ttl_s=1_000, deadline=soon())
    time.sleep(2.1)
    plain.exists(keys[:1], deadline=soon())
    plain.touch(keys[1:2], ttl_s=10, deadline=soon())
    plain.touch(keys[2:3], ttl_s=2_000, deadline=soon())
    idle = [own_redis.do("OBJECT", "IDLETIME", str(key)) for key in keys]
    assert idle[0] >= 2
    assert idle[1:] == [0, 0]


def test_many_keys_are_asked_for_in_a_few_commands(
    store: StoreBackend, proxy: FaultProxy
) -> None:
    keys = make_keys(2_500)
    there = [n % 7 == 0 or n > 2_400 for n in range(2_500)]
    entries = sources(
        [key for key, is_there in zip(keys, there, strict=True) if is_there], 10
    )
    store.put(entries, ttl_s=100, deadline=soon())
    outcomes = [DONE if is_there else MISSING for is_there in there]
    store.exists(keys[:1], deadline=soon())
    before = len(proxy.commands)
    assert store.exists(keys, deadline=soon()).outcomes == outcomes
    assert len(proxy.commands) - before == 3
    assert store.touch(keys, ttl_s=100, deadline=soon()).outcomes == outcomes
    store.delete(keys, deadline=soon())


def test_the_server_forgets_scripts(own_redis: Server, plain: StoreBackend) -> None:
    keys = make_keys(2)
    plain.put(sources(keys[:1]), ttl_s=100, deadline=soon())
    for _ in range(2):
        own_redis.do("SCRIPT", "FLUSH")
        touched = plain.touch(keys, ttl_s=100, deadline=soon())
        assert touched.outcomes == [DONE, MISSING]
        assert plain.exists(keys, deadline=soon()).outcomes == [DONE, MISSING]


def test_another_type_under_our_name_is_no_value(
    own_redis: Server, plain: StoreBackend
) -> None:
    """It is missing, which is no failure of the store, and is written over."""
    own_redis.do("LPUSH", str(make_key(0)), "x")
    own_redis.do("PEXPIRE", str(make_key(0)), 100_000)
    entry = source(make_key(0))
    room = [memoryview(bytearray(100))]
    got = plain.get([type(entry)(entry.key, room)], deadline=soon())
    assert (got.outcomes, got.error) == ([MISSING], None)
    assert plain.put([entry], ttl_s=9, deadline=soon()).outcomes == [DONE]
    got = plain.get([type(entry)(entry.key, room)], deadline=soon())
    assert got.outcomes == [DONE]


@pytest.mark.parametrize("reply", [b":1\r\n", b"$1\r\n1\r\n", b"$-1\r\n", b"+OK\r\n"])
def test_an_answer_of_no_sense_to_a_script(fake: FaultProxy, reply: bytes) -> None:
    fake.add(Fault(commands=("EVALSHA",), reply=reply))
    with closing(open_store(fake.url, OPTIONS).blocks) as store:
        touched = store.touch(make_keys(3), ttl_s=9, deadline=soon())
    assert touched.outcomes == [FAILED] * 3
    assert "sense" in str(touched.error)


def test_it_runs_on_valkey_as_well(embedded: EmbeddedServer) -> None:
    with closing(open_store(embedded.url, OPTIONS).blocks) as store:
        assert store.capabilities.exact_ttl
        assert store.capabilities.is_shared
        keys = make_keys(2, start=500)
        put = store.put(sources(keys), ttl_s=100, deadline=soon())
        assert put.outcomes == [DONE] * 2
        assert store.delete(keys, deadline=soon()).outcomes == [DONE] * 2
