"""A real HTTP server that answers from a table and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    method: str
    path: str
    authorization: str | None
    body: Any


@dataclass(kw_only=True)
class ControlServer:
    """Answers are taken from ``answers`` in order; the last one repeats."""

    url: str
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def will_answer(self, body: object, status: int = 200) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers.append((status, raw))

    def take_answer(self) -> tuple[int, bytes]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def control_server() -> Iterator[ControlServer]:
    control: ControlServer

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            control.asked.append(
                Asked(
                    method=self.command,
                    path=self.path,
                    authorization=self.headers.get("Authorization"),
                    body=json.loads(raw) if raw else None,
                )
            )
            status, body = control.take_answer()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        control = ControlServer(url=f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield control
        server.shutdown()
        thread.join()
