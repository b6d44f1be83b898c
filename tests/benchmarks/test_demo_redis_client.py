from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.demo_redis.client import MODEL_NAME, SessionClient


class FakeServer(ThreadingHTTPServer):
    """Answers as a test tells it to, and remembers what it was asked.

    Attributes:
        asked: method, path and body, in order.
        answers: by path; the last one is given again and again.
    """

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, Any]] = []
        self.answers: dict[str, list[tuple[int, str]]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, *bodies: object, status: int = 200) -> None:
        texts = [b if isinstance(b, str) else json.dumps(b) for b in bodies]
        self.answers[path] = [(status, text) for text in texts]


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, self.path, body))
        queue = self.server.answers.get(self.path, [(404, "no such path")])
        status, text = queue.pop(0) if len(queue) > 1 else queue[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(fake: FakeServer) -> Iterator[SessionClient]:
    with SessionClient(fake.url) as made:
        yield made


def stream(*chunks: object) -> str:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([": a comment\n\n", *lines, "data: [DONE]\n\n"])


USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}


def test_an_answer_is_its_chunks_joined(
    fake: FakeServer, client: SessionClient
) -> None:
    chunks = [
        {"choices": [{"token_ids": [1, 2]}]},
        {"choices": [{"token_ids": None}]},
        {"choices": [{"token_ids": [3]}]},
        {"choices": [], "usage": USAGE},
    ]
    fake.answer("/v1/completions", stream(*chunks))
    answer = client.complete([5] * 9, 3, session_id="me")
    assert answer.token_ids == [1, 2, 3]
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 8)
    assert answer.ttft_s > 0
    [(method, _, body)] = fake.asked
    assert method == "POST"
    assert body["model"] == MODEL_NAME
    assert body["agent_hint"]["session_id"] == "me"
    assert (body["max_tokens"], body["temperature"]) == (3, 0)
    assert "cache_salt" not in body


def test_a_salted_request_belongs_to_no_session(
    fake: FakeServer, client: SessionClient
) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": None}
    fake.answer("/v1/completions", stream({"choices": [], "usage": usage}))
    assert client.complete([5] * 9, 1, cache_salt="cold").cached_tokens == 0
    [(_, _, body)] = fake.asked
    assert body["cache_salt"] == "cold"
    assert "agent_hint" not in body


def test_a_refused_completion_is_an_error_in_the_servers_words(
    fake: FakeServer, client: SessionClient
) -> None:
    fake.answer("/v1/completions", "too long", status=400)
    with pytest.raises(RuntimeError, match="too long"):
        client.complete([5], 1)


def test_an_edit_waits_for_its_end(fake: FakeServer, client: SessionClient) -> None:
    path = "/v1/agent/sessions/me/edits"
    fake.answer(path, {"results": [{"status": "completed", "blocks": 3}]})
    assert client.edit("me", "offload")["blocks"] == 3
    [(_, _, body)] = fake.asked
    assert body["edits"] == [{"type": "offload"}]
    assert body["wait_s"] > 0


@pytest.mark.parametrize("status", ["accepted", "partial", "rejected", "not_found"])
def test_an_edit_that_was_not_carried_out_is_an_error(
    fake: FakeServer, client: SessionClient, status: str
) -> None:
    fake.answer("/v1/agent/sessions/me/edits", {"results": [{"status": status}]})
    with pytest.raises(RuntimeError, match=f"prefetch of me.*{status}"):
        client.edit("me", "prefetch")


def test_emptying_keeps_the_store_and_waits_for_blocks_in_use(
    fake: FakeServer, client: SessionClient
) -> None:
    fake.answer("/v1/agent/reset?keep_store=true", "")
    fake.answer("/reset_prefix_cache", {"success": False}, {"success": True})
    client.empty()
    paths = [path for _, path, _ in fake.asked]
    assert paths == [
        "/v1/agent/reset?keep_store=true",
        "/reset_prefix_cache",
        "/reset_prefix_cache",
    ]


@pytest.mark.parametrize("kept", ["host_used_slots", "sessions"])
def test_a_server_that_holds_something_is_not_empty(
    fake: FakeServer, client: SessionClient, kept: str
) -> None:
    stats = {"host_used_slots": 0, "sessions": 0}
    fake.answer("/v1/agent/stats", stats)
    client.check_empty()
    fake.answer("/v1/agent/stats", {**stats, kept: 1})
    with pytest.raises(RuntimeError, match=kept):
        client.check_empty()


def test_a_counter_is_read_and_an_unknown_route_is_an_error(
    fake: FakeServer, client: SessionClient
) -> None:
    fake.answer("/v1/agent/stats", {"store_read_bytes": 12})
    assert client.stat("store_read_bytes") == 12
    fake.answers.clear()
    with pytest.raises(RuntimeError, match="GET /v1/agent/stats: no such path"):
        client.stat("store_read_bytes")
