"""The layer in an application: what passes untouched, what is changed, what refused."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from sam_connector.core.types import Edit, EditType
from sam_connector.middleware.access import Access
from sam_connector.middleware.lowering_layer import MANAGE_WAIT_S, LoweringLayer
from sam_connector.protocol.control import ApplyEdits, failure, success
from tests.middleware.driver import (
    CARRIER_PATHS,
    DISCONNECT,
    INFERENCE_PATHS,
    Server,
    body_messages,
    exchange,
    http_scope,
    make_server,
)
from tests.protocol.invalid_hints import INVALID_HINTS

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HINT = {"session_id": "s", "cache_control": {"ttl": 60}}
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
each_path = pytest.mark.parametrize("path", INFERENCE_PATHS)


@pytest.fixture
def server() -> Server:
    return make_server()


@pytest.fixture
def keyed() -> Server:
    """Keys are required; the check itself is tested with vLLM's own."""
    return make_server(api_key="k1")


def key(value: str) -> dict[str, str]:
    return {"authorization": f"Bearer {value}"}


def lowered(server: Server) -> Any:
    return server.last_body["kv_transfer_params"]["agent_hint"]


class Probe:
    """An innermost application that remembers the very objects it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Scope, Receive, Send]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls.append((scope, receive, send))


def probe_layer(**options: Any) -> tuple[Probe, LoweringLayer]:
    probe = Probe()
    return probe, LoweringLayer(probe, Access(make_server().app, **options))


async def never() -> Message:
    raise AssertionError("received")


async def no_send(message: Message) -> None:
    raise AssertionError("sent")


# --- untouched ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": CHAT, "headers": []},
        http_scope("GET", CHAT),
        http_scope("OPTIONS", CHAT),
        http_scope("POST", "/v1/embeddings"),
        http_scope("POST", "/v1/agent/sessions/s/edits"),
        http_scope("POST", "/tokenize"),
        *(http_scope("POST", path) for path in CARRIER_PATHS),
    ],
    ids=lambda scope: f"{scope['type']}-{scope.get('method')}-{scope.get('path')}",
)
def test_everything_else_passes_with_the_very_same_objects(scope: Scope) -> None:
    probe, layer = probe_layer()
    asyncio.run(layer(scope, never, no_send))
    ((seen_scope, receive, send),) = probe.calls
    assert seen_scope is scope
    assert receive is never
    assert send is no_send


@each_path
def test_without_a_hint_the_same_bytes_arrive(server: Server, path: str) -> None:
    raw = b'{"model" :\t"m", "content": "gr\xc3\xb6\xc3\x9fe"}\n'
    assert server.post(path, raw).status == 200
    assert server.seen[-1][0] == raw


def test_without_a_hint_scope_and_send_are_the_very_same() -> None:
    probe, layer = probe_layer()
    scope = http_scope("POST", CHAT)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    asyncio.run(layer(scope, receive, no_send))
    assert probe.calls[0][0] is scope
    assert probe.calls[0][2] is no_send


@pytest.mark.parametrize(
    "raw", [b"", b"agent_hint", b'{"agent_hint": ', b'["agent_hint"]', b"\xff\x00"]
)
def test_what_is_no_json_object_is_left_to_vllm(server: Server, raw: bytes) -> None:
    assert server.post(CHAT, raw).status == 200
    assert server.seen[-1][0] == raw


def test_p03_a_compressed_body_passes_untouched(server: Server) -> None:
    raw = gzip.compress(json.dumps(PLAIN | {"agent_hint": HINT}).encode())
    server.post(CHAT, raw, headers={"content-encoding": "gzip"})
    assert server.seen[-1][0] == raw
    assert server.last_headers["content-length"] == str(len(raw))


# --- lowered ------------------------------------------------------------------------


@each_path
@pytest.mark.parametrize("num_chunks", [1, 7, 1000])
def test_a_hint_is_lowered_however_the_body_comes(
    server: Server, path: str, num_chunks: int
) -> None:
    body = PLAIN | {"agent_hint": HINT}
    assert server.post(path, body, num_chunks=num_chunks).status == 200
    assert lowered(server) == {
        "session_id": "s",
        "cache_control": {"type": "ephemeral", "ttl": 60},
    }
    assert "agent_hint" not in server.last_body


@each_path
def test_p03_content_length_follows_body(server: Server, path: str) -> None:
    server.post(path, PLAIN | {"agent_hint": HINT})
    raw, headers = server.seen[-1]
    assert headers["content-length"] == str(len(raw))


def test_p03_a_chunked_request_gets_no_content_length(server: Server) -> None:
    scope = http_scope("POST", CHAT, {"transfer-encoding": "chunked"})
    raw = json.dumps(PLAIN | {"agent_hint": HINT}).encode()
    asyncio.run(exchange(server.app, scope, body_messages([raw[:9], raw[9:]])))
    assert "content-length" not in server.last_headers
    assert lowered(server)["session_id"] == "s"


def test_p03_response_headers_are_untouched(server: Server) -> None:
    plain = server.post(CHAT, PLAIN)
    hinted = server.post(CHAT, PLAIN | {"agent_hint": HINT})
    assert hinted.headers == plain.headers
    assert hinted.body == plain.body


def test_the_original_scope_is_not_changed() -> None:
    probe, layer = probe_layer()
    raw = json.dumps({"agent_hint": HINT}).encode()
    scope = http_scope("POST", CHAT, {"content-length": str(len(raw)), "x-a": "b"})
    before = list(scope["headers"])

    async def receive() -> Message:
        return {"type": "http.request", "body": raw}

    asyncio.run(layer(scope, receive, no_send))
    assert scope["headers"] == before
    assert probe.calls[0][0]["headers"] != before
    assert (b"x-a", b"b") in probe.calls[0][0]["headers"]


@pytest.mark.parametrize("root_path", ["/api", "/v1"])
def test_root_path_is_respected(root_path: str) -> None:
    server = make_server(root_path=root_path)
    path = root_path + CHAT
    server.post(path, PLAIN | {"agent_hint": HINT}, root_path=root_path)
    assert lowered(server)["session_id"] == "s"


def test_a_final_line_break_in_the_path_does_not_pass_by_us(server: Server) -> None:
    """Routing itself lets it pass, so the body would reach the engine unchecked."""
    response = server.post(f"{CHAT}%0A", PLAIN | {"agent_hint": {"session_id": ""}})
    assert response.status == 400
    assert server.seen == []


def test_p06_nothing_unknown_to_vllm_is_left_in_the_body(server: Server) -> None:
    for path in INFERENCE_PATHS:
        server.post(path, PLAIN | {"agent_hint": HINT})
        added = server.last_body.keys() - PLAIN.keys()
        native = "vllm_xargs" if path == MESSAGES else "session_id"
        assert added == {"kv_transfer_params", native}


@pytest.mark.vllm
def test_p06_vllm_s_request_models_know_every_field(server: Server) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    table: list[tuple[Any, dict[str, Any]]] = [
        (ChatCompletionRequest, PLAIN),
        (CompletionRequest, {"model": "m", "prompt": "hi"}),
        (ResponsesRequest, {"model": "m", "input": "hi"}),
        (AnthropicMessagesRequest, PLAIN | {"max_tokens": 1}),
    ]
    for path, (model, body) in zip(INFERENCE_PATHS, table, strict=True):
        server.post(path, body | {"agent_hint": HINT})
        request = model.model_validate(server.last_body)
        added = server.last_body.keys() - body.keys()
        assert added <= model.model_fields.keys()
        assert request.kv_transfer_params["agent_hint"] == lowered(server)
        if path == MESSAGES:
            assert request.vllm_xargs == {"session_id": "s"}
        else:
            assert request.session_id == "s"


def test_p15_the_header_names_the_session_of_a_hint(server: Server) -> None:
    body = PLAIN | {"agent_hint": {"cache_control": {}}}
    server.post(CHAT, body, headers={"X-Session-ID": "h"})
    assert lowered(server)["session_id"] == "h"


def test_p15_without_an_id_no_session_is_made(server: Server) -> None:
    server.post(CHAT, PLAIN | {"agent_hint": {}})
    assert server.last_body == PLAIN


def test_p10_the_hint_travels_in_its_own_request(server: Server) -> None:
    """A hundred at once with one request id, each with its own retention."""

    async def run() -> None:
        async def one(number: int) -> None:
            hint = {"session_id": "s", "cache_control": {"ttl": number}}
            body = PLAIN | {"user": str(number), "agent_hint": hint}
            raw = json.dumps(body).encode()
            scope = http_scope("POST", CHAT, {"x-request-id": "same"})
            await exchange(server.app, scope, body_messages([raw[:20], raw[20:]]))

        await asyncio.gather(*map(one, range(100)))

    asyncio.run(run())
    bodies = [json.loads(raw) for raw, _ in server.seen]
    assert len(bodies) == 100
    for body in bodies:
        hint = body["kv_transfer_params"]["agent_hint"]
        assert hint["cache_control"]["ttl"] == int(body["user"])


def test_p09_equal_ids_do_not_meet_here(server: Server) -> None:
    body = PLAIN | {"request_id": "same", "agent_hint": HINT}
    for _ in range(2):
        assert server.post(CHAT, body, headers={"x-request-id": "same"}).status == 200
    assert server.seen[0] == server.seen[1]


@pytest.mark.parametrize(
    "session_id", ["0123456789abcdef", "a b/c", "größe 会话", "%2F", "../.."]
)
def test_p12_ids_are_opaque(server: Server, session_id: str) -> None:
    server.post(CHAT, PLAIN | {"agent_hint": {"session_id": session_id}})
    assert lowered(server)["session_id"] == session_id


# --- disconnects --------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"agent_hint": HINT}], ids=["plain", "hint"])
def test_p01_a_disconnect_reaches_the_application(extra: dict[str, Any]) -> None:
    raw = json.dumps(PLAIN | extra).encode()
    server = make_server()
    received: list[str] = []

    async def generate(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        received.append(message["type"])
        assert not message["more_body"]
        received.append((await receive())["type"])

    layer = LoweringLayer(generate, Access(server.app))
    messages = [*body_messages([raw]), DISCONNECT]
    asyncio.run(exchange(layer, http_scope("POST", CHAT), messages))
    assert received == ["http.request", "http.disconnect"]


def test_p01_leaving_while_sending_never_becomes_a_request(server: Server) -> None:
    raw = json.dumps(PLAIN | {"agent_hint": HINT}).encode()
    messages: list[Message] = [
        {"type": "http.request", "body": raw, "more_body": True},
        DISCONNECT,
    ]
    asyncio.run(_ignoring_disconnect(server, messages))
    assert server.seen == []


async def _ignoring_disconnect(server: Server, messages: list[Message]) -> None:
    from starlette.requests import ClientDisconnect

    with pytest.raises(ClientDisconnect):
        await exchange(server.app, http_scope("POST", CHAT), messages)


# --- refused ------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(("wire", "field"), INVALID_HINTS)
def test_an_invalid_hint_is_a_400_that_names_its_field(
    server: Server, wire: object, field: str, path: str
) -> None:
    response = server.post(path, PLAIN | {"agent_hint": wire})
    assert response.status == 400
    error = response.json["error"]
    assert error["message"].startswith(f"{field}: ")
    if path == CHAT:
        assert error["param"] == field
        assert error["type"] == "BadRequestError"
    else:
        assert error["type"] == "invalid_request_error"
    assert server.seen == []


@each_path
@pytest.mark.parametrize("manage", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        lambda hint: ({"user": "\ud800"}, hint),
        lambda hint: ({}, hint | {"session_id": "\ud800"}),
        lambda hint: ({}, hint | {"parent_session_id": "\ud800"}),
    ],
)
def test_p07_a_lone_surrogate_is_a_400(
    server: Server, path: str, manage: bool, place: Any
) -> None:
    fields, hint = place(
        {
            "session_id": "s",
            "context_management": {
                "manage_request": manage,
                "edits": [{"type": "evict"}],
            },
        }
    )
    response = server.post(path, PLAIN | fields | {"agent_hint": hint})
    assert response.status == 400
    assert server.seen == []
    assert server.engine.commands == []


def huge(total: int, *, late: bytes = b"") -> list[Message]:
    chunk = b" " * (1 << 20)
    chunks = [chunk] * (total >> 20)
    return body_messages([b'{"model": "m", "pad": "', *chunks, b'"', late, b"}"])


@each_path
def test_p04_a_huge_chunked_body_with_a_hint_is_a_413(path: str) -> None:
    server = make_server()
    chunks = body_messages([b'{"agent_hint": {}, "pad": "', *[b" " * (1 << 20)] * 200])
    response = asyncio.run(exchange(server.app, http_scope("POST", path), chunks))
    assert response.status == 413
    assert response.num_received < 70
    assert server.seen == []
    assert "error" in response.json


def test_p04_a_huge_body_without_hint_goes_on_as_on_stock() -> None:
    server = make_server()
    scope = http_scope("POST", CHAT)
    assert asyncio.run(exchange(server.app, scope, huge(200 << 20))).status == 200
    assert len(server.seen[-1][0]) > 200 << 20


def test_p04_a_hint_at_the_end_of_a_huge_body_is_a_413() -> None:
    server = make_server()
    messages = huge(70 << 20, late=b', "agent_hint": {"session_id": "s"}')
    response = asyncio.run(exchange(server.app, http_scope("POST", CHAT), messages))
    assert response.status == 413
    assert server.seen == []


# --- management requests ------------------------------------------------------------

EVICT_NOW = {
    "session_id": "s",
    "context_management": {"manage_request": True, "edits": [{"type": "evict"}]},
}
RESULT = {"type": "evict", "status": "completed"}


@each_path
@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"prompt": ""}, {"input": ""}, PLAIN]
)
def test_a_management_request_is_answered_without_the_model(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    server.engine.answer = lambda command: success(
        {"session_id": "s", "results": [RESULT]}
    )
    response = server.post(path, body | {"n": 3, "agent_hint": EVICT_NOW})
    assert response.status == 200
    assert response.json["kv_transfer_params"] == {
        "agent_hint": {"session_id": "s", "results": [RESULT]}
    }
    assert response.json["model"] == body.get("model", "served")
    assert server.seen == []
    assert server.engine.commands == [
        ApplyEdits(
            tenant="",
            session_id="s",
            edits=(Edit(type=EditType.EVICT),),
            wait_s=MANAGE_WAIT_S,
        )
    ]


@each_path
def test_a_streaming_client_gets_a_stream(server: Server, path: str) -> None:
    server.engine.answer = lambda command: success(
        {"session_id": "s", "results": [RESULT]}
    )
    response = server.post(path, PLAIN | {"stream": True, "agent_hint": EVICT_NOW})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert b'"results": [{"type": "evict", "status": "completed"}]' in response.body


def test_an_unknown_session_is_a_result(server: Server) -> None:
    missing = {"type": "evict", "status": "not_found"}
    server.engine.answer = lambda command: success(
        {"session_id": "s", "results": [missing]}, found=False
    )
    response = server.post(CHAT, {"agent_hint": EVICT_NOW})
    assert response.status == 200
    results = response.json["kv_transfer_params"]["agent_hint"]["results"]
    assert results == [missing]


def test_a_paused_engine_rejects_each_edit(server: Server) -> None:
    server.engine.answer = lambda command: failure("rejected", "the engine sleeps")
    response = server.post(CHAT, {"agent_hint": EVICT_NOW})
    (result,) = response.json["kv_transfer_params"]["agent_hint"]["results"]
    assert (result["status"], result["reason"]) == ("rejected", "the engine sleeps")


def test_nothing_to_do_asks_nobody(server: Server) -> None:
    hint = {"session_id": "s", "context_management": {"manage_request": True}}
    response = server.post(CHAT, {"agent_hint": hint})
    assert response.json["kv_transfer_params"]["agent_hint"]["results"] == []
    assert server.engine.commands == []


@each_path
@pytest.mark.parametrize(
    "answer", [RuntimeError("engine died"), failure("unavailable", "no connector")]
)
def test_an_engine_that_cannot_is_a_503_in_the_endpoint_s_shape(
    server: Server, path: str, answer: Any
) -> None:
    server.engine.answer = lambda command: answer
    response = server.post(path, {"agent_hint": EVICT_NOW})
    assert response.status == 503
    assert response.json.get("type") == ("error" if path == MESSAGES else None)
    assert response.json["error"]["message"]


# --- tenants ------------------------------------------------------------------------


def test_each_key_has_its_own_sessions(keyed: Server) -> None:
    tenants = []
    for value in ("k1", "k2", "k1"):
        keyed.post(CHAT, PLAIN | {"agent_hint": HINT}, headers=key(value))
        tenants.append(lowered(keyed)["tenant"])
    assert tenants[0] == tenants[2] != tenants[1]


SPOOFED = {"session_id": "s", "tenant": "victim"}


@each_path
@pytest.mark.parametrize(
    "spell",
    [
        lambda text: text.encode(),
        lambda text: text.replace("agent_hint", r"agent\u005fhint").encode(),
        lambda text: text.replace("agent_hint", r"\u0061gent_hint").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-32-le"),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
    ],
)
def test_a_client_cannot_name_a_tenant_in_any_spelling(
    keyed: Server, path: str, spell: Any
) -> None:
    text = json.dumps(PLAIN | {"kv_transfer_params": {"agent_hint": SPOOFED}})
    headers = key("k1") | {"content-encoding": "gzip", "content-type": "text/plain"}
    keyed.post(path, spell(text), headers=headers)
    assert lowered(keyed)["tenant"] not in ("", "victim")


@pytest.mark.parametrize("path", CARRIER_PATHS)
def test_a_client_cannot_name_a_tenant_on_other_routes(
    keyed: Server, path: str
) -> None:
    for body in (
        {"kv_transfer_params": {"agent_hint": SPOOFED}},
        {
            "sampling_params": {
                "extra_args": {"kv_transfer_params": {"agent_hint": SPOOFED}}
            }
        },
    ):
        keyed.post(path, body, headers=key("k1"))
        assert b"victim" not in keyed.seen[-1][0]
        assert lowered(keyed)["tenant"]


@each_path
def test_a_session_of_vllm_s_own_gets_its_tenant(keyed: Server, path: str) -> None:
    keyed.post(path, PLAIN, headers=key("k1") | {"X-Session-ID": "s"})
    assert list(lowered(keyed)) == ["tenant"]


def test_without_keys_vllm_s_own_session_passes_untouched(server: Server) -> None:
    raw = b'{"session_id":"s"}'
    server.post(CHAT, raw, headers={"X-Session-ID": "s"})
    assert server.seen[-1][0] == raw


def test_a_management_request_speaks_of_its_own_tenant(keyed: Server) -> None:
    for value in ("k1", "k2"):
        hint = EVICT_NOW | {"tenant": "victim"}
        keyed.post(CHAT, {"agent_hint": hint}, headers=key(value))
    first, second = keyed.engine.commands
    assert isinstance(first, ApplyEdits)
    assert isinstance(second, ApplyEdits)
    assert first.tenant
    assert second.tenant
    assert first.tenant != second.tenant
    assert "victim" not in (first.tenant, second.tenant)
