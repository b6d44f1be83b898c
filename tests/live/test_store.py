"""Two servers and one store: a session goes on where it has never been."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sam_backends.embedded import EmbeddedServer
from tests.live.endpoints import session_of, session_path
from tests.live.host_tier import counted, edit
from tests.live.server import LiveServer, wait_until_idle
from tests.live.store import Session, forget, offloaded, with_store

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="module")
def a_server(store: EmbeddedServer) -> Iterator[LiveServer]:
    with with_store(store.url) as server:
        yield server


@pytest.fixture(scope="module")
def b_server(store: EmbeddedServer) -> Iterator[LiveServer]:
    with with_store(store.url) as server:
        yield server


def test_a_session_goes_on_on_a_server_that_never_served_it(
    a_server: LiveServer, b_server: LiveServer
) -> None:
    session = offloaded(a_server, "moves")
    forget(b_server)
    assert session_of(b_server, "moves") is None
    with counted(b_server, "store_read_values", "store_manifests_read") as risen:
        result = edit(b_server, "moves", "prefetch")
    assert result["status"] == "completed", result
    assert result["blocks"]["done"] >= session.num_block_tokens // 32
    assert risen["store_read_values"] > 0
    assert risen["store_manifests_read"] == 1
    assert session.again(b_server) == session.num_block_tokens
    known = session_of(b_server, "moves")
    assert known is not None
    assert known["blocks"]["store"] > 0


def test_a_request_finds_what_the_store_has_without_being_announced(
    a_server: LiveServer, b_server: LiveServer
) -> None:
    session = offloaded(a_server, "unannounced")
    forget(b_server)
    with counted(b_server, "external_hit_tokens", "store_lookup_hits") as risen:
        cached = session.again(b_server, by_name=False)
    assert cached >= session.num_block_tokens - 64  # the last value is not whole
    assert risen["external_hit_tokens"] == cached
    assert risen["store_lookup_hits"] > 0


def test_what_the_store_says_of_a_session(a_server: LiveServer) -> None:
    session = Session("told")
    session.serve(a_server)
    known = session_of(a_server, "told")
    assert known is not None
    assert known["blocks"]["store"] == 0
    assert edit(a_server, "told", "offload")["status"] == "completed"
    known = session_of(a_server, "told")
    assert known is not None
    assert known["blocks"]["store"] >= session.num_block_tokens // 32


def test_an_evict_is_heard_by_all(a_server: LiveServer, b_server: LiveServer) -> None:
    session = offloaded(a_server, "ended")
    forget(b_server)
    assert edit(b_server, "ended", "evict")["status"] == "completed"
    assert edit(b_server, "ended", "prefetch")["status"] == "not_found"
    assert edit(a_server, "ended", "prefetch")["status"] == "not_found"
    # What it left is still right for whoever asks with its tokens.
    assert session.again(b_server) > 0


def test_a_purge_leaves_nothing(a_server: LiveServer, b_server: LiveServer) -> None:
    session = Session("purged")
    session.serve(a_server)
    assert edit(a_server, "purged", "offload")["status"] == "completed"
    body = {"edits": [{"type": "evict", "purge": True}], "wait_s": 10}
    answer = a_server.post(f"{session_path('purged')}/edits", body)
    assert answer.json()["results"][0]["status"] == "completed"
    wait_until_idle(a_server)
    forget(b_server)
    assert session.again(b_server) == 0
    assert session.again(a_server) == 0


def test_a_freed_session_is_found_nowhere(
    a_server: LiveServer, b_server: LiveServer
) -> None:
    session = Session("freed")
    session.serve(a_server)
    assert edit(a_server, "freed", "offload")["status"] == "completed"
    assert a_server.delete(session_path("freed")).status_code == 200
    wait_until_idle(a_server)
    assert edit(b_server, "freed", "prefetch")["status"] == "not_found"


def test_nobody_knows_a_session_that_never_was(a_server: LiveServer) -> None:
    assert edit(a_server, "never-was", "prefetch")["status"] == "not_found"
    assert edit(a_server, "never-was", "evict")["status"] == "not_found"
    assert edit(a_server, "never-was", "offload")["status"] == "not_found"


def test_a_reset_of_everything_makes_what_is_stored_unreadable(
    a_server: LiveServer, b_server: LiveServer
) -> None:
    session = offloaded(a_server, "void")
    answer = b_server.post("/reset_prefix_cache?reset_external=true")
    assert answer.status_code == 200
    assert edit(b_server, "void", "prefetch")["status"] == "not_found"
    assert session.again(b_server) == 0
    assert session.again(a_server) > 0  # for the others nothing has changed


def test_two_leads_one_prefix(a_server: LiveServer) -> None:
    """What another session shares is written once."""
    one = Session("one")
    one.serve(a_server)
    other = Session("other")
    other.prompt = [*one.prompt, *other.prompt]
    other.serve(a_server)
    with counted(a_server, "store_write_values") as first:
        assert edit(a_server, "one", "offload")["status"] == "completed"
    with counted(a_server, "store_write_values") as second:
        assert edit(a_server, "other", "offload")["status"] == "completed"
    assert 0 < second["store_write_values"] < 2 * first["store_write_values"] + 2


def test_metrics_say_that_the_store_is_there(a_server: LiveServer) -> None:
    Session("measured").serve(a_server)
    metrics = a_server.metrics()
    assert metrics["vllm:sam_store_up"] == 1.0
    assert metrics["vllm:sam_store_write_bytes_total"] > 0
