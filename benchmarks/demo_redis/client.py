"""A client that goes on with sessions, and looks where their blocks are."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

MODEL_NAME = "demo"
_DATA = "data: "
_MAX_RESET_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as the client saw it."""

    token_ids: list[int]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


class SessionClient:
    """Talks to one server; use as a context manager.

    Everything raises ``RuntimeError`` with the server's words if it refuses.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=240.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def complete(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Answer:
        """Generates greedily, exactly ``num_tokens`` tokens."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if session_id is not None:
            body["agent_hint"] = {
                "session_id": session_id,
                "cache_control": {"type": "ephemeral", "ttl": 300},
            }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return self._stream(body)

    def edit(self, session_id: str, kind: str) -> dict[str, Any]:
        """Offloads or prefetches a session, and waits until that is done."""
        answer = self._call(
            "POST",
            f"/v1/agent/sessions/{session_id}/edits",
            {"edits": [{"type": kind}], "wait_s": 30},
        )
        result: dict[str, Any] = answer["results"][0]
        if result["status"] != "completed":
            raise RuntimeError(f"{kind} of {session_id}: {result}")
        return result

    def empty(self) -> None:
        """Empties the server's own caches; what it has stored stays."""
        self._call("POST", "/v1/agent/reset?keep_store=true")
        deadline = time.monotonic() + _MAX_RESET_S
        while not self._call("POST", "/reset_prefix_cache")["success"]:
            if time.monotonic() > deadline:
                raise RuntimeError("the server could not reset: blocks are in use")
            time.sleep(0.1)

    def check_empty(self) -> None:
        """Raises ``RuntimeError`` unless the server has nothing in its memory."""
        stats = self._call("GET", "/v1/agent/stats")
        kept = {name: stats[name] for name in ("host_used_slots", "sessions")}
        if any(kept.values()):
            raise RuntimeError(f"the server is not empty: {kept}")

    def stat(self, name: str) -> int:
        return int(self._call("GET", "/v1/agent/stats")[name])

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._http.request(method, path, json=body)
        if response.is_error:
            raise RuntimeError(f"{method} {path}: {response.text[:500]}")
        return response.json() if response.content else {}

    def _stream(self, body: dict[str, Any]) -> Answer:
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        ttft_s = 0.0
        begin = time.monotonic()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise RuntimeError(response.text[:500])
            for line in response.iter_lines():
                if not line.startswith(_DATA) or line == f"{_DATA}[DONE]":
                    continue
                chunk = json.loads(line.removeprefix(_DATA))
                for choice in chunk.get("choices", ()):
                    ttft_s = ttft_s or time.monotonic() - begin
                    token_ids += choice.get("token_ids") or ()
                usage = chunk.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            token_ids=token_ids,
            ttft_s=ttft_s,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )
