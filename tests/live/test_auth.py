"""A server with API keys: nothing of ours answers without one, and each is a tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from tests.live.endpoints import COMPLETIONS, PATHS, body_of, managing, session_path
from tests.live.server import LiveServer

LEASE = {"cache_control": {"ttl": 600}}
EVICT = {"edits": [{"type": "evict"}]}
CONTROL_CALLS = [
    ("GET", "/v1/agent/sessions"),
    ("GET", "/v1/agent/sessions/s"),
    ("POST", "/v1/agent/sessions/s/edits"),
    ("PUT", "/v1/agent/sessions/s/lease"),
    ("DELETE", "/v1/agent/sessions/s"),
    ("GET", "/v1/agent/operations/op-1"),
    ("GET", "/v1/agent/stats"),
    ("POST", "/v1/agent/reset"),
    ("GET", "/v1/agent/unknown"),
]

each_path = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[LiveServer]:
    """Its own client has the key ``k1``; ``k2`` is good too."""
    # The last of two equal options counts.
    extra_args = ["--api-key", "k1", "k2"]
    with LiveServer(api_key="k1", extra_args=extra_args) as server:
        yield server


@pytest.fixture
def other(keyed_server: LiveServer) -> Iterator[httpx.Client]:
    """The other tenant; it forgets its sessions afterwards."""
    with _client(keyed_server, "Bearer k2") as client:
        yield client
        sessions = client.get("/v1/agent/sessions").json()["sessions"]
        for session in sessions:
            client.delete(session_path(session["session_id"]))


@pytest.fixture(
    params=[None, "Bearer k3", "Basic k1"], ids=["no_key", "wrong_key", "wrong_scheme"]
)
def stranger(
    request: pytest.FixtureRequest, keyed_server: LiveServer
) -> Iterator[httpx.Client]:
    with _client(keyed_server, request.param) as client:
        yield client


def _client(server: LiveServer, authorization: str | None) -> httpx.Client:
    headers = {} if authorization is None else {"Authorization": authorization}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def _complete(client: httpx.Client, session_id: str, **fields: object) -> None:
    hint = {"session_id": session_id, **LEASE}
    body = body_of(COMPLETIONS) | {"agent_hint": hint} | fields
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text


# --- without a key --------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), CONTROL_CALLS)
def test_control_routes_need_a_key(
    keyed_server: LiveServer, stranger: httpx.Client, method: str, path: str
) -> None:
    _complete(keyed_server.client, "s")
    answer = stranger.request(method, path, json={"edits": 5, "ttl": "x"})
    assert answer.status_code == 401
    assert keyed_server.get(session_path("s")).status_code == 200


@each_path
def test_hints_are_not_read_without_a_key(
    stranger: httpx.Client, keyed_server: LiveServer, path: str
) -> None:
    for hint in ({"session_id": ""}, {"session_id": "s", **LEASE}, managing("s")):
        answer = stranger.post(path, json=body_of(path) | {"agent_hint": hint})
        assert answer.status_code == 401
        assert "agent_hint" not in answer.text
    assert keyed_server.stats()["sessions"] == 0


@each_path
def test_bodies_are_not_parsed_without_a_key(stranger: httpx.Client, path: str) -> None:
    nested = b'{"agent_hint":' + b"[" * 100_000
    for raw in (b'{"agent_hint": ', nested, b"\xff\xfe"):
        headers = {"Content-Type": "application/json"}
        answer = stranger.post(path, content=raw, headers=headers)
        assert answer.status_code == 401


# --- with keys ------------------------------------------------------------------------


@each_path
def test_hints_count_with_a_key(keyed_server: LiveServer, path: str) -> None:
    hint = {"session_id": "s", **LEASE}
    answer = keyed_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200, answer.text
    assert keyed_server.get(session_path("s")).json()["lease_s"] > 0
    answer = keyed_server.post(path, body_of(path) | {"agent_hint": {"session_id": 5}})
    assert answer.status_code == 400


def test_equal_ids_of_two_tenants_are_two_sessions(
    keyed_server: LiveServer, other: httpx.Client
) -> None:
    _complete(keyed_server.client, "s")
    assert other.get(session_path("s")).status_code == 404
    assert other.get("/v1/agent/sessions").json()["sessions"] == []
    _complete(other, "s")
    assert keyed_server.stats()["sessions"] == 2
    assert other.post(session_path("s") + "/edits", json=EVICT).status_code == 200
    assert other.get(session_path("s")).status_code == 404
    assert keyed_server.get(session_path("s")).json()["lease_s"] > 0


def test_tenant_cannot_touch_what_is_not_its_own(
    keyed_server: LiveServer, other: httpx.Client
) -> None:
    _complete(keyed_server.client, "s")
    path = session_path("s")
    assert other.delete(path).status_code == 404
    assert other.delete(f"{path}?tree=true").status_code == 404
    assert other.put(f"{path}/lease", json={"ttl": 0}).status_code == 404
    results = other.post(f"{path}/edits", json=EVICT).json()["results"]
    assert results[0]["status"] == "not_found"
    for route in PATHS:
        body = body_of(route) | {"agent_hint": managing("s", "evict")}
        told = other.post(route, json=body).json()["kv_transfer_params"]["agent_hint"]
        assert told["results"][0]["status"] == "not_found"
    assert keyed_server.get(path).json()["lease_s"] > 0


def test_parents_are_looked_up_in_the_same_tenant(
    keyed_server: LiveServer, other: httpx.Client
) -> None:
    _complete(keyed_server.client, "lead")
    hint = {"session_id": "child", "parent_session_id": "lead"}
    body = body_of(COMPLETIONS) | {"agent_hint": hint}
    assert other.post(COMPLETIONS, json=body).status_code == 200
    assert keyed_server.get(session_path("lead")).json()["children"] == []
    keyed_server.delete(f"{session_path('lead')}?tree=true")
    assert other.get(session_path("child")).status_code == 200


@each_path
def test_session_header_belongs_to_the_tenant(
    keyed_server: LiveServer, other: httpx.Client, path: str
) -> None:
    answer = other.post(path, json=body_of(path), headers={"X-Session-ID": "h"})
    assert answer.status_code == 200, answer.text
    assert other.get(session_path("h")).status_code == 200
    assert keyed_server.get(session_path("h")).status_code == 404


@pytest.mark.parametrize("path", [*PATHS, "/invocations"])
def test_tenant_that_a_body_claims_is_ignored(
    keyed_server: LiveServer, other: httpx.Client, path: str
) -> None:
    tenant = hashlib.sha256(b"k1").hexdigest()[:16]
    _complete(keyed_server.client, "s")
    spoof = {
        "session_id": "s",
        "tenant": tenant,
        "context_management": {"edits": [{"type": "evict"}]},
    }
    fields = {"kv_transfer_params": {"agent_hint": spoof}}
    route = path if path in PATHS else COMPLETIONS
    answer = other.post(path, json=body_of(route) | fields)
    assert answer.status_code == 200, answer.text
    assert keyed_server.get(session_path("s")).json()["lease_s"] > 0


def test_route_outside_the_check_reaches_no_tenant(
    keyed_server: LiveServer, stranger: httpx.Client
) -> None:
    """vLLM checks no key on ``/invocations``."""
    _complete(keyed_server.client, "s")
    spoof = {"session_id": "s", "tenant": hashlib.sha256(b"k1").hexdigest()[:16]}
    spoof |= {"context_management": {"edits": [{"type": "evict"}]}}
    body = body_of(COMPLETIONS) | {"kv_transfer_params": {"agent_hint": spoof}}
    assert stranger.post("/invocations", json=body).status_code == 200
    assert keyed_server.get(session_path("s")).json()["lease_s"] > 0
