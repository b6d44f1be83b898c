"""Inside the check of API keys, once, with lifespan or without it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sam_connector.middleware import AgentHintMiddleware, register_endpoints
from sam_connector.middleware.access import Access
from sam_connector.middleware.lowering_layer import LoweringLayer
from sam_connector.protocol.control import success
from tests.middleware.driver import (
    CARRIER_PATHS,
    INFERENCE_PATHS,
    Server,
    body_messages,
    call,
    exchange,
    http_scope,
    make_server,
)

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/agent/sessions"
BODY = {"agent_hint": {"session_id": "s"}}


async def run_lifespan(app: ASGIApp) -> list[str]:
    """Starts and stops the application as a server does."""
    sent: list[str] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan", "asgi": {}, "state": {}}, receive, send)
    return sent


def num_layers(server: Server) -> int:
    count, stack = 0, server.app.router.middleware_stack
    while isinstance(stack, LoweringLayer):
        count, stack = count + 1, stack.app
    return count


def num_routes(server: Server) -> int:
    paths = [getattr(route, "path", "") for route in server.app.routes]
    return sum(path.startswith("/v1/agent") for path in paths)


def test_lifespan_installs_and_goes_on() -> None:
    server = make_server()
    assert num_layers(server) == 0
    assert asyncio.run(run_lifespan(server.app)) == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert num_layers(server) == 1
    server.post(CHAT, BODY)
    assert server.last_body["session_id"] == "s"


def test_without_lifespan_the_first_request_is_served_already() -> None:
    server = make_server()
    server.engine.answer = lambda command: success({"sessions": []})
    assert call(server.app, "GET", SESSIONS, b"").json == {"sessions": []}
    server.post(CHAT, BODY)
    assert server.last_body["session_id"] == "s"


def test_it_is_installed_once_however_often_it_is_asked_for() -> None:
    server = make_server(middleware=[(AgentHintMiddleware, {})])
    register_endpoints(server.app)
    routes = num_routes(server)
    asyncio.run(run_lifespan(server.app))
    register_endpoints(server.app)
    server.post(CHAT, BODY)
    assert num_layers(server) == 1
    assert num_routes(server) == routes == 8


def test_two_applications_are_installed_apart() -> None:
    first, second = make_server(), make_server()
    for server in (first, second):
        server.post(CHAT, BODY)
    assert num_layers(first) == num_layers(second) == 1
    assert first.app.state.sam_access is not second.app.state.sam_access


def test_settings_may_be_given() -> None:
    server = make_server(install=False)
    register_endpoints(server.app, Access(server.app, max_body_bytes=8))
    assert server.post(CHAT, BODY).status == 413


@pytest.mark.parametrize("kind", ["lifespan", "websocket", "http"])
def test_the_middleware_passes_on_the_very_same_objects(kind: str) -> None:
    seen: list[Any] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend((scope, receive, send))

    async def receive() -> Message:
        raise AssertionError("received")

    async def send(message: Message) -> None:
        raise AssertionError("sent")

    scope = http_scope("POST", CHAT) | {"type": kind, "app": make_server().app}
    asyncio.run(AgentHintMiddleware(inner)(scope, receive, send))
    assert seen[0] is scope
    assert seen[1] is receive
    assert seen[2] is send


def test_p01_the_entry_point_is_a_class_with_the_plain_signature() -> None:
    """vLLM wraps functions in a middleware that hides disconnects, classes not."""
    import inspect

    import sam_connector

    entry = sam_connector.AgentHintMiddleware
    assert inspect.isclass(entry)
    assert not inspect.iscoroutinefunction(entry)
    names = list(inspect.signature(entry.__call__).parameters)
    assert names == ["self", "scope", "receive", "send"]


def test_a_bare_asgi_application_is_left_alone() -> None:
    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    wrapped = AgentHintMiddleware(bare)
    response = asyncio.run(exchange(wrapped, http_scope("POST", CHAT)))
    assert response.status == 204


# --- with vLLM's own check ------------------------------------------------------------

GOOD = {"authorization": "Bearer k1"}
BAD = [
    {},
    {"authorization": "Bearer k2"},
    {"authorization": "Basic k1"},
    {"authorization": "Bearer"},
    {"x-api-key": "k1"},
]
INVALID = {"agent_hint": {"session_id": ""}}
MANAGE = {
    "agent_hint": {
        "session_id": "s",
        "context_management": {"manage_request": True, "edits": [{"type": "evict"}]},
    }
}


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Server:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    check = (AuthenticationMiddleware, {"tokens": ["k1"]})
    root_path = getattr(request, "param", "")
    return make_server(middleware=[check], api_key="k1", root_path=root_path)


@pytest.mark.vllm
@pytest.mark.parametrize("lifespan", [False, True])
@pytest.mark.parametrize("headers", BAD)
@pytest.mark.parametrize("body", [INVALID, MANAGE, BODY, b"agent_hint"])
def test_without_the_key_no_body_is_read_and_nothing_of_ours_answers(
    guarded: Server, headers: dict[str, str], body: Any, lifespan: bool
) -> None:
    if lifespan:
        asyncio.run(run_lifespan(guarded.app))
    for path in INFERENCE_PATHS:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        scope = http_scope("POST", path, headers)
        response = asyncio.run(exchange(guarded.app, scope, body_messages([raw])))
        assert response.status == 401
        assert response.json == {"error": "Unauthorized"}
        assert response.num_received == 0
    assert guarded.engine.commands == []
    assert guarded.seen == []


@pytest.mark.vllm
@pytest.mark.parametrize("headers", BAD)
def test_without_the_key_no_control_route_answers(
    guarded: Server, headers: dict[str, str]
) -> None:
    for method, path in [
        ("GET", SESSIONS),
        ("GET", f"{SESSIONS}/s"),
        ("DELETE", f"{SESSIONS}/s?tree=true"),
        ("PUT", f"{SESSIONS}/s/lease"),
        ("POST", f"{SESSIONS}/s/edits"),
        ("GET", "/v1/agent/operations/op-1"),
        ("GET", "/v1/agent/stats"),
        ("POST", "/v1/agent/reset"),
    ]:
        assert call(guarded.app, method, path, {"ttl": 1}, headers).status == 401
        # OPTIONS passes the check unauthenticated, and must reach nothing.
        assert call(guarded.app, "OPTIONS", path, b"", headers).status == 405
    assert guarded.engine.commands == []


@pytest.mark.vllm
@pytest.mark.parametrize("guarded", ["", "/api"], indirect=True)
def test_with_the_key_everything_works(guarded: Server) -> None:
    root = guarded.app.root_path
    guarded.engine.answer = lambda command: success({"session_id": "s", "results": []})
    options: dict[str, Any] = {"headers": GOOD, "root_path": root}
    for path in INFERENCE_PATHS:
        assert guarded.post(root + path, INVALID, **options).status == 400
        assert guarded.post(root + path, MANAGE, **options).status == 200
        assert guarded.post(root + path, BODY, **options).status == 200
        assert guarded.last_body["kv_transfer_params"]["agent_hint"]["tenant"]
    response = call(guarded.app, "GET", f"{root}{SESSIONS}/s", b"", **options)
    assert response.status == 200


@pytest.mark.vllm
def test_a_route_outside_the_check_gets_no_tenant_without_a_key(
    guarded: Server,
) -> None:
    """vLLM does not guard ``/invocations``: only a key proves a tenant there."""
    spoofed = {"kv_transfer_params": {"agent_hint": {"tenant": "x", "session_id": "s"}}}
    assert "/invocations" in CARRIER_PATHS
    guarded.post("/invocations", spoofed, headers=GOOD)
    assert guarded.last_body["kv_transfer_params"]["agent_hint"]["tenant"] != "x"
    guarded.post("/invocations", spoofed)
    assert guarded.last_body["kv_transfer_params"]["agent_hint"].get("tenant") == ""
