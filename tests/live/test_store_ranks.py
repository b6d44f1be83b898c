"""Several ranks and one store; and a server that is killed and started anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis as redis_py

from sam_backends.embedded import EmbeddedServer
from sam_connector.storage.key import StoreKey
from tests.live.host_tier import edit
from tests.live.server import LiveServer
from tests.live.store import Session, forget, with_store

pytestmark = pytest.mark.redis

#: Two ranks on two cores are slow to start and slow to compute.
TOKENS = 12 * 32 + 5


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="module")
def tp_server(store: EmbeddedServer) -> Iterator[LiveServer]:
    with with_store(store.url, extra_args=["--tensor-parallel-size", "2"]) as server:
        yield server


def ranks_in(store: EmbeddedServer) -> list[int]:
    """The rank of every value in the store."""
    with redis_py.Redis.from_url(store.url) as client:
        names = [key.decode() for key in client.keys("sam1:*")]
    return [StoreKey.parse(name).rank for name in names]


def test_every_rank_stores_its_share_and_brings_it_back(
    tp_server: LiveServer, store: EmbeddedServer
) -> None:
    session = Session("ranks", TOKENS)
    session.serve(tp_server)
    assert edit(tp_server, "ranks", "offload")["status"] == "completed"
    ranks = ranks_in(store)
    assert ranks.count(0) == ranks.count(1) > 0
    forget(tp_server)
    assert edit(tp_server, "ranks", "prefetch")["status"] == "completed"
    assert session.again(tp_server) == session.num_block_tokens
    forget(tp_server)
    assert session.again(tp_server, by_name=False) > 0


def test_what_one_rank_lost_is_lost_for_all(
    tp_server: LiveServer, store: EmbeddedServer
) -> None:
    session = Session("lost", TOKENS)
    session.serve(tp_server)
    assert edit(tp_server, "lost", "offload")["status"] == "completed"
    with redis_py.Redis.from_url(store.url) as client:
        for key in client.keys("sam1:*"):
            if StoreKey.parse(key.decode()).rank == 1:
                client.delete(key)
    forget(tp_server)
    assert edit(tp_server, "lost", "prefetch")["status"] == "rejected"
    assert session.again(tp_server) == 0


def test_a_server_that_was_killed_finds_its_sessions(store: EmbeddedServer) -> None:
    session = Session("outlives")
    with with_store(store.url) as server:
        session.serve(server)
        assert edit(server, "outlives", "offload")["status"] == "completed"
    with with_store(store.url) as server:  # stopping is killing
        assert server.stats()["sessions"] == 0
        assert edit(server, "outlives", "prefetch")["status"] == "completed"
        assert session.again(server) == session.num_block_tokens
