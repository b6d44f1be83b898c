from __future__ import annotations

import asyncio

import pytest

from benchmarks.demo import pool_run
from benchmarks.demo.pool_run import DEMO_ARMS, PoolRecord, PoolRun, order
from benchmarks.demo.server import ServerKind
from tests.benchmarks.demo.fake_server import (
    BYTES_PER_REQUEST,
    LEAD_AND_CHILDREN,
    FakeServer,
    plan,
)

Servers = dict[ServerKind, FakeServer]


@pytest.fixture
def servers() -> Servers:
    return {kind: FakeServer() for kind in DEMO_ARMS}


def run(
    servers: Servers, *, num_repeats: int = 2, identity: bool = False
) -> PoolRecord:
    pool = PoolRun(
        plan(LEAD_AND_CHILDREN),
        DEMO_ARMS,
        lambda kind: servers[kind].client(),
        lambda line: None,
    )
    return asyncio.run(pool.run(num_repeats=num_repeats, identity=identity))


def calls_of(record: PoolRecord) -> int:
    assert record.control_calls[ServerKind.STOCK].total() == 0
    return record.control_calls[ServerKind.HINTS].total()


def test_every_server_is_first_second_and_third_once() -> None:
    kinds = list(DEMO_ARMS)
    orders = [order(kinds, repeat) for repeat in range(3)]
    for place in range(3):
        assert {given[place] for given in orders} == set(kinds)
    assert orders[0] == [ServerKind.STOCK, ServerKind.TIER, ServerKind.HINTS]
    assert order(kinds, 3) == orders[0]


def test_every_repeat_begins_with_empty_caches(servers: Servers) -> None:
    record = run(servers, num_repeats=3)
    for kind in DEMO_ARMS:
        rates = [
            sum(done.cached_tokens for done in replay.results.values())
            for replay in record.replays[kind]
        ]
        assert len(rates) == 3
        assert len(set(rates)) == 1


def test_a_cache_that_was_not_emptied_is_an_error(servers: Servers) -> None:
    servers[ServerKind.TIER].resets_have_effect = False
    with pytest.raises(RuntimeError, match="tier: the cache was not empty"):
        run(servers)


def test_bytes_are_those_of_the_repeat(servers: Servers) -> None:
    record = run(servers)
    for kind in (ServerKind.TIER, ServerKind.HINTS):
        saved = [replay.saved_bytes for replay in record.replays[kind]]
        assert saved == [6 * BYTES_PER_REQUEST] * 2
        assert {replay.loaded_bytes for replay in record.replays[kind]} == {0}
    assert {replay.saved_bytes for replay in record.replays[ServerKind.STOCK]} == {0}


def test_only_the_server_with_hints_is_told_anything(servers: Servers) -> None:
    record = run(servers)
    for kind in (ServerKind.STOCK, ServerKind.TIER):
        assert servers[kind].controls == []
        assert set(servers[kind].hints) == {None}
    told = servers[ServerKind.HINTS].controls
    assert len(told) == calls_of(record) == 2 * 6
    assert ("reset sessions",) not in servers[ServerKind.STOCK].log


def test_repeats_name_different_sessions(servers: Servers) -> None:
    run(servers)
    names = {name for what, name, *_ in servers[ServerKind.HINTS].controls}
    assert {name.partition(":")[0] for name in names} == {"demo-1", "demo-2"}


def test_the_identity_is_taken_of_all_servers_after_the_repeats(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_run, "IDENTITY_TURNS", slice(3, 5))
    record = run(servers, identity=True)
    assert set(record.identity) == set(DEMO_ARMS)
    tokens = [record.identity[kind].tokens for kind in DEMO_ARMS]
    assert tokens[0].keys() == {3, 4}
    assert tokens[0] == tokens[1] == tokens[2]
    # The servers' own counters are those of two requests to warm up and the replays.
    assert record.stats[ServerKind.TIER]["saved_bytes"] == (2 + 12) * BYTES_PER_REQUEST
    # What the comparison of tokens tells the server is no part of the replays.
    assert calls_of(record) == 2 * 6
    assert servers[ServerKind.HINTS].controls[-1][1].startswith("identity:")
