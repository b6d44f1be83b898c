"""Drives an ASGI application message by message, as a server would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Scope

from sam_connector.middleware import AgentHintMiddleware
from sam_connector.protocol.control import Command, Reply, decode_command, success

INFERENCE_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
CARRIER_PATHS = (
    "/v1/chat/completions/batch",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/invocations",
)
DISCONNECT: Message = {"type": "http.disconnect"}


@dataclass
class Response:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes
    num_received: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def http_scope(
    method: str, path: str, headers: dict[str, str] | None = None, root_path: str = ""
) -> Scope:
    """The scope of one request; ``path`` as on the wire, with its query."""
    raw_path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(raw_path),
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "root_path": root_path,
        "headers": [
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in (headers or {}).items()
        ],
        "client": ("test", 1),
        "server": ("test", 80),
    }


def body_messages(chunks: Iterable[bytes]) -> list[Message]:
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    return messages


async def exchange(
    app: ASGIApp, scope: Scope, messages: Iterable[Message] = (DISCONNECT,)
) -> Response:
    """Runs one request; after ``messages`` the client is silent."""
    pending = iter(messages)
    sent: list[Message] = []
    received = 0

    async def receive() -> Message:
        nonlocal received
        for message in pending:
            received += 1
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return Response(0, {}, b"", received)
    return Response(
        sent[0]["status"],
        {name.decode(): value.decode() for name, value in sent[0]["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
        received,
    )


def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    *,
    root_path: str = "",
    num_chunks: int = 1,
) -> Response:
    """One request with a body given whole; a ``bytes`` body goes as it is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": str(len(raw))}
    size = max(1, -(-len(raw) // num_chunks))
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
    scope = http_scope(method, path, given | (headers or {}), root_path)
    return asyncio.run(exchange(app, scope, body_messages(chunks)))


def post(app: ASGIApp, path: str, body: object, **options: Any) -> Response:
    return call(app, "POST", path, body, **options)


@dataclass
class FakeEngineCore:
    """An engine that records commands and answers with what it is told to."""

    answer: Callable[[Command], Reply | str | Exception] = lambda command: success({})
    commands: list[Command] = field(default_factory=list)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        assert method == "sam_control"
        (payload,) = args
        assert isinstance(payload, str)
        command = decode_command(payload)
        self.commands.append(command)
        answer = self.answer(command)
        if isinstance(answer, Exception):
            raise answer
        return answer.encode() if isinstance(answer, Reply) else answer


@dataclass
class Server:
    """An application like vLLM's: the same routes, echoing what reaches them.

    Attributes:
        seen: for each request that reached a route, its body and headers.
    """

    app: FastAPI
    engine: FakeEngineCore
    seen: list[tuple[bytes, dict[str, str]]]

    @property
    def last_body(self) -> Any:
        return json.loads(self.seen[-1][0])

    @property
    def last_headers(self) -> dict[str, str]:
        return self.seen[-1][1]

    def post(self, path: str, body: object, **options: Any) -> Response:
        return post(self.app, path, body, **options)


def make_server(
    *,
    middleware: Sequence[tuple[type, dict[str, Any]]] = (),
    api_key: str | None = None,
    install: bool = True,
    root_path: str = "",
) -> Server:
    """Builds the application; ``middleware`` is added before, so inside, ours."""
    app = FastAPI(root_path=root_path)
    engine = FakeEngineCore()
    server = Server(app, engine, [])
    app.state.args = SimpleNamespace(
        api_key=[api_key] if api_key else None,
        served_model_name=["served"],
        model="path/to/model",
        log_error_stack=False,
    )
    app.state.engine_client = SimpleNamespace(engine_core=engine)

    async def echo(request: Request) -> JSONResponse:
        server.seen.append((await request.body(), dict(request.headers)))
        return JSONResponse({"reached": request.url.path})

    for path in (*INFERENCE_PATHS, *CARRIER_PATHS, "/v1/embeddings"):
        app.add_api_route(path, echo, methods=["POST", "GET"])
    for cls, options in middleware:
        app.add_middleware(cls, **options)
    if install:
        app.add_middleware(AgentHintMiddleware)
    return server
