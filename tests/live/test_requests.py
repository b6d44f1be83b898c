"""Requests out of the ordinary: many at once, odd ids, clients that leave, beams."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
import pytest

from tests.live.endpoints import COMPLETIONS, PATHS, body_of, session_of
from tests.live.server import BLOCK_SIZE, LiveServer, leak_check, wait_until_idle

NUM_PARALLEL = 40
TTL_STEP_S = 50
LEASE = {"cache_control": {"ttl": 600}}
PROMPT = list(range(100, 100 + 3 * BLOCK_SIZE))
LONG = 1500


@pytest.fixture(params=["random_ids", "ids_of_clients"])
def any_ids_server(request: pytest.FixtureRequest) -> LiveServer:
    """With and without the random part that vLLM adds to each request's id."""
    is_random = request.param == "random_ids"
    name = "live_server" if is_random else "small_server"
    server: LiveServer = request.getfixturevalue(name)
    return server


# --- request ids ----------------------------------------------------------------------


def test_p10_every_hint_reaches_its_own_request(any_ids_server: LiveServer) -> None:
    """Distinct leases, all routes, all at the same time."""
    server = any_ids_server
    server.reset_prefix_cache()

    def ask(number: int) -> int:
        path = PATHS[number % len(PATHS)]
        hint = {
            "session_id": f"s-{number:02}",
            "cache_control": {"ttl": (number + 1) * TTL_STEP_S},
        }
        # One whole block each, so that every lease fits into the protected share.
        body = body_of(path, f"{number:02} " + "and " * 30)
        return server.post(path, body | {"agent_hint": hint}).status_code

    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        assert set(pool.map(ask, range(NUM_PARALLEL))) == {200}
    sessions = server.get("/v1/agent/sessions?limit=100").json()["sessions"]
    names = [session["session_id"] for session in sessions]
    assert names == [f"s-{number:02}" for number in range(NUM_PARALLEL)]
    leases = [session["lease_s"] for session in sessions]
    assert None not in leases
    assert max(leases) <= NUM_PARALLEL * TTL_STEP_S
    assert all(earlier < later for earlier, later in pairwise(leases))


def test_p09_equal_request_ids_at_the_same_time(live_server: LiveServer) -> None:
    """Without the random part vLLM's own engine ends on two equal ids, stock too."""

    def ask(session_id: str) -> int:
        body = body_of(COMPLETIONS, max_tokens=100) | {
            "ignore_eos": True,
            "request_id": "same",
            "agent_hint": {"session_id": session_id, **LEASE},
        }
        headers = {"X-Request-Id": "same"}
        return live_server.client.post(
            COMPLETIONS, json=body, headers=headers
        ).status_code

    names = ["one", "two", "both", "both"]
    with ThreadPoolExecutor(len(names)) as pool:
        assert set(pool.map(ask, names)) == {200}
    for name in names:
        session = session_of(live_server, name)
        assert session is not None
        assert session["running_requests"] == 0
        assert session["lease_s"] is not None
    assert live_server.stats()["running_requests"] == 0


@pytest.mark.parametrize(
    "request_id",
    ["", "0123456789abcdef", "x" * 4096, "a/b c", "../%2e", "\u2603 \u00fc", "s"],
    ids=["empty", "hex", "4096", "slash_space", "dots", "unicode", "as_session"],
)
def test_p12_request_ids_of_any_form_are_opaque(
    any_ids_server: LiveServer, request_id: str
) -> None:
    hint = {"session_id": "s", **LEASE}
    any_ids_server.complete(PROMPT, hint=hint, request_id=request_id)
    session = session_of(any_ids_server, "s")
    assert session is not None
    assert session["lease_s"] is not None


# --- clients that leave ---------------------------------------------------------------


@contextlib.contextmanager
def running_request(server: LiveServer, *, stream: bool) -> Iterator[None]:
    """A request that runs; its client's socket is closed on leaving."""
    body = json.dumps(
        body_of(COMPLETIONS, max_tokens=LONG)
        | {
            "ignore_eos": True,
            "stream": stream,
            "agent_hint": {"session_id": "gone", **LEASE},
        }
    ).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + body)
        while not server.stats()["running_requests"]:
            time.sleep(0.05)
        yield


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_p01_request_ends_when_its_client_leaves(
    live_server: LiveServer, stream: bool
) -> None:
    before = live_server.metrics()["vllm:generation_tokens_total"]
    with running_request(live_server, stream=stream):
        session = session_of(live_server, "gone")
        assert session is not None
        assert session["running_requests"] == 1
    wait_until_idle(live_server)
    generated = live_server.metrics()["vllm:generation_tokens_total"] - before
    assert generated < LONG
    session = session_of(live_server, "gone")
    assert session is not None
    assert session["running_requests"] == 0


def test_session_may_be_forgotten_while_it_runs(live_server: LiveServer) -> None:
    with running_request(live_server, stream=True):
        assert live_server.delete("/v1/agent/sessions/gone").json() == {"freed": 1}
        answer = live_server.post(
            "/v1/agent/sessions/gone/edits", {"edits": [{"type": "evict"}]}
        )
        assert answer.json()["results"][0]["status"] == "not_found"
    leak_check(live_server)


def test_edit_while_a_request_runs_leaves_its_blocks_alone(
    live_server: LiveServer,
) -> None:
    with running_request(live_server, stream=True):
        answer = live_server.post(
            "/v1/agent/sessions/gone/edits", {"edits": [{"type": "evict"}]}
        )
        assert answer.status_code == 200, answer.text
        stats = live_server.stats()
        assert stats["free_blocks"] < stats["total_blocks"]
        assert stats["internal_errors"] == 0
    leak_check(live_server)


# --- a full pool ----------------------------------------------------------------------


def test_l01_requests_of_any_size_are_served_though_all_is_leased(
    small_server: LiveServer,
) -> None:
    """Leases fill their share, edits ask for more, and requests want all blocks."""
    num_blocks = small_server.stats()["total_blocks"]
    names = [f"idle-{number}" for number in range(4)]
    for number, name in enumerate(names):
        prompt = [200 + number] * (num_blocks // 5 * BLOCK_SIZE + 1)
        small_server.complete(prompt, hint={"session_id": name, **LEASE})
    stats = small_server.stats()
    assert stats["protected_blocks"] > num_blocks // 2

    def want(number: int) -> int:
        prompt = [300 + number] * ((num_blocks - 2) * BLOCK_SIZE)
        answer = small_server.complete(prompt, hint={"session_id": f"busy-{number}"})
        return len(answer["choices"])

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(want, number) for number in range(4)]
        for name in names:
            edits = {"edits": [{"type": "prefetch"}], "wait_s": 1}
            answer = small_server.post(f"/v1/agent/sessions/{name}/edits", edits)
            assert answer.status_code == 200, answer.text
        assert [answer.result() for answer in answers] == [1] * 4
    assert small_server.stats()["leases_broken"] > stats["leases_broken"]


# --- several sequences for one request ------------------------------------------------


def test_p13_beam_search_in_a_session(live_server: LiveServer) -> None:
    """Every step of every beam is a request of its own that names the session.

    vLLM hands on the session's id to them and nothing else of the hint.
    """
    answer = live_server.complete(
        PROMPT,
        max_tokens=8,
        hint={"session_id": "beam", **LEASE},
        use_beam_search=True,
        n=4,
    )
    assert len(answer["choices"]) == 4
    stats = live_server.stats()
    assert stats["sessions"] == 1
    assert stats["running_requests"] == 0
    assert stats["timers"] <= stats["contexts"] <= 4
    assert stats["claimed_blocks"] <= 4


def test_p13_streamed_beam_search_is_refused(live_server: LiveServer) -> None:
    fields = {"use_beam_search": True, "n": 4, "stream": True}
    hint = {"session_id": "beam", **LEASE}
    answer = live_server.post(
        COMPLETIONS, body_of(COMPLETIONS) | fields | {"agent_hint": hint}
    )
    assert answer.status_code == 400
    assert session_of(live_server, "beam") is None


def test_p13_parallel_samples_share_one_session(live_server: LiveServer) -> None:
    answer = live_server.complete(
        PROMPT, hint={"session_id": "n", **LEASE}, n=3, temperature=1, seed=1
    )
    assert len(answer["choices"]) == 3
    session = session_of(live_server, "n")
    assert session is not None
    assert session["lease_s"] is not None
    assert session["running_requests"] == 0


# --- other bodies ---------------------------------------------------------------------


def test_body_that_comes_in_chunks_is_lowered(live_server: LiveServer) -> None:
    hint = {"session_id": "chunks", **LEASE}
    raw = json.dumps(body_of(COMPLETIONS) | {"agent_hint": hint}).encode()
    chunks = (raw[start : start + 50] for start in range(0, len(raw), 50))
    answer = httpx.post(
        live_server.url + COMPLETIONS,
        content=chunks,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert session_of(live_server, "chunks") is not None


def test_p07_lone_surrogate_is_a_400(live_server: LiveServer) -> None:
    hint = '"agent_hint": {"session_id": "s"}'
    raw = '{"model": "tiny", "prompt": "\\ud800", ' + hint + "}"
    answer = live_server.client.post(
        COMPLETIONS, content=raw, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert "prompt" in answer.text
    assert session_of(live_server, "s") is None
