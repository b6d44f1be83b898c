"""The path of our own: connections, shares, and values of every size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from sam_backends.embedded import EmbeddedServer
from sam_backends.redis_store import direct, open_store
from sam_connector.errors import StoreUnavailable
from sam_connector.storage.port import Outcome, StoreBackend
from sam_connector.storage.registry import StoreOptions
from tests.backends.builders import (
    is_right,
    make_keys,
    soon,
    sources,
    target,
    targets,
)
from tests.backends.fault_proxy import Fault, FaultProxy

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
_LARGE = 2 << 20


@contextmanager
def _store(url: str, num_connections: int) -> Iterator[StoreBackend]:
    options = StoreOptions(connect_timeout_s=1.0, num_connections=num_connections)
    with closing(open_store(url, options).blocks) as store:
        yield store


@pytest.mark.parametrize("num_connections", [1, 2, 3])
def test_a_large_batch_goes_over_as_many_connections_as_are_given(
    proxy: FaultProxy, num_connections: int
) -> None:
    """And its results are in order: every third value is missing."""
    with _store(proxy.url, num_connections) as store:
        keys = make_keys(9)
        there = [key for n, key in enumerate(keys) if n % 3]
        put = store.put(sources(there, _LARGE), ttl_s=100, deadline=soon())
        assert put.outcomes == [DONE] * 6
        entries = targets(keys, _LARGE)
        result = store.get(entries, deadline=soon())
        assert result.outcomes == [DONE if n % 3 else MISSING for n in range(9)]
        assert all(is_right(entry) for n, entry in enumerate(entries) if n % 3)
        assert proxy.num_connections == num_connections
        store.delete(keys, deadline=soon())


def test_a_small_batch_is_not_spread(proxy: FaultProxy) -> None:
    with _store(proxy.url, 3) as store:
        store.get(targets(make_keys(5), 100_000), deadline=soon())
        assert proxy.num_connections == 1


def test_helpers_come_back_and_are_shared(embedded: EmbeddedServer) -> None:
    """Many large batches at a time, each right."""
    with _store(embedded.url, 3) as store:
        keys = make_keys(6)
        store.put(sources(keys, _LARGE), ttl_s=100, deadline=soon())

        def read(_: int) -> bool:
            entries = targets(keys, _LARGE)
            result = store.get(entries, deadline=soon())
            return result.outcomes == [DONE] * 6 and all(map(is_right, entries))

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(read, range(12)))
        store.delete(keys, deadline=soon())


def test_one_share_that_breaks_leaves_the_others(proxy: FaultProxy) -> None:
    with _store(proxy.url, 2) as store:
        keys = make_keys(6)
        store.put(sources(keys, _LARGE), ttl_s=100, deadline=soon())
        proxy.add(Fault(commands=("GET",), key=str(keys[3]).encode(), cut_after=9))
        entries = targets(keys, _LARGE)
        result = store.get(entries, deadline=soon())
        assert result.outcomes == [DONE, DONE, DONE, FAILED, DONE, FAILED]
        assert isinstance(result.error, StoreUnavailable)
        proxy.clear()
        store.delete(keys, deadline=soon())


def test_a_value_far_too_long_costs_its_connection_and_no_more(
    embedded: EmbeddedServer, proxy: FaultProxy
) -> None:
    with _store(proxy.url, 1) as store:
        keys = make_keys(3)
        store.put(sources(keys), ttl_s=100, deadline=soon())
        large = [*sources(keys[1:2], 9 << 20)]
        store.put(large, ttl_s=100, deadline=soon())
        entries = targets(keys)
        result = store.get(entries, deadline=soon())
        assert result.outcomes == [DONE, MISSING, DONE]
        assert is_right(entries[2])
        assert proxy.num_connections == 2
        store.delete(keys, deadline=soon())


def test_many_values_far_too_long_are_no_outage(proxy: FaultProxy) -> None:
    with _store(proxy.url, 1) as store:
        keys = make_keys(6)
        store.put(sources(keys[:1]), ttl_s=100, deadline=soon())
        for key in keys[1:]:
            name = str(key).encode()
            proxy.add(Fault(commands=("GET",), key=name, reply=b"$9999999\r\n"))
        result = store.get(targets([*keys[1:], keys[0]]), deadline=soon())
        assert (result.outcomes, result.error) == ([*[MISSING] * 5, DONE], None)
        store.delete(keys, deadline=soon())


@pytest.mark.parametrize("num_bytes", [1, 4_096, 65_536, 300_000])
def test_small_values_are_asked_for_ahead_within_bounds(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(direct, "_AHEAD_BYTES", 200_000)
    monkeypatch.setattr(direct, "_MAX_AHEAD", 3)
    with _store(proxy.url, 1) as store:
        keys = make_keys(20)
        store.put(sources(keys, num_bytes), ttl_s=100, deadline=soon())
        entries = targets(keys, num_bytes)
        assert store.get(entries, deadline=soon()).outcomes == [DONE] * 20
        assert all(map(is_right, entries))
        store.delete(keys, deadline=soon())


def test_it_connects_when_it_is_first_asked() -> None:
    with FaultProxy() as fake:
        url = fake.url
        with _store(url, 2) as store:
            assert fake.num_connections == 0
            fake.refuse()
            result = store.get([target(make_keys(1)[0])], deadline=soon())
            assert result.outcomes == [FAILED]
            fake.accept()
            result = store.get([target(make_keys(1)[0])], deadline=soon())
            assert result.outcomes == [MISSING]


def test_a_closed_store_keeps_no_connection(proxy: FaultProxy) -> None:
    """Also one that was in use when it was closed."""
    with _store(proxy.url, 1) as store:
        proxy.add(Fault(commands=("GET",), delay_s=0.3, times=1))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(
                store.get, targets(make_keys(1, start=77)), deadline=soon()
            )
            while not any(c[0] == b"GET" for c in proxy.commands):
                pass
            store.close()
            assert call.result().outcomes[0] in (MISSING, FAILED)
        result = store.get(targets(make_keys(1)), deadline=soon())
        assert "closed" in str(result.error)
