"""A real vLLM server for tests, and the check that nothing is left behind in it."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from benchmarks.common import CACHE_DIR, VllmServer, sam_flags
from benchmarks.demo.model import ModelSpec, ensure_model

MODEL_NAME = "tiny"
BLOCK_SIZE = 32
NUM_BLOCKS = 200

#: Half the width of the demo's model: tests want answers, not delays.
TEST_MODEL = ModelSpec(
    hidden_size=256, intermediate_size=704, num_heads=4, num_kv_heads=4
)

#: Gauges of ``/v1/agent/stats`` that count something held.
HELD = (
    "sessions",
    "contexts",
    "records",
    "timers",
    "running_requests",
    "claimed_blocks",
    "protected_blocks",
    "waiters",
)

#: The same of the host tier, where there is one.
HELD_BY_TIER = (
    "host_held_slots",
    "host_pinned_slots",
    "gpu_pinned_blocks",
    "jobs_in_flight",
    "operations_open",
    "queued_saves",
    "store_jobs_in_flight",
    "store_bytes_in_flight",
    "store_queued",
    "store_calls_open",
)

#: Gauges that return to zero by themselves.
_BUSY = (
    "running_requests",
    "jobs_in_flight",
    "operations_open",
    "queued_saves",
    "store_jobs_in_flight",
    "store_queued",
    "store_calls_open",
)

_SETTLE_S = 10.0
_METRIC = re.compile(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_numbers = itertools.count(1)


class LiveServer:
    """One server, stock or ours, with a client that carries its API key.

    Args:
        connector: ours (the two flags), or stock.
        extra_args: further arguments of the server.
        env: variables added to its environment.
        config: settings of the connector.
        api_key: the server demands it, and the client sends it.
        by_module_path: load the connector by module instead of by entry point.
        num_blocks: size of the block pool, the null block included.
        model: folder of the model; a small Llama unless given.
    """

    def __init__(
        self,
        *,
        connector: bool = True,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        config: Mapping[str, object] | None = None,
        api_key: str | None = None,
        by_module_path: bool = False,
        num_blocks: int = NUM_BLOCKS,
        model: Path | None = None,
    ) -> None:
        self._ours = connector
        flags = sam_flags(config, by_module_path=by_module_path) if connector else []
        auth = ["--api-key", api_key] if api_key else []
        self._server = VllmServer(
            model or ensure_model(TEST_MODEL),
            [*_base_args(num_blocks), *auth, *flags, *extra_args],
            # Benchmarks that a test has imported ask for fewer lines.
            env={"VLLM_LOGGING_LEVEL": "INFO", **(env or {})},
            log_path=_log_path(),
        )
        self.url = self._server.url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def start(self) -> Self:
        self._server.launch().wait_healthy()
        return self

    def stop(self) -> None:
        self.client.close()
        self._server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_ours(self) -> bool:
        return self._ours

    @property
    def is_running(self) -> bool:
        return self._server.is_running

    @property
    def pid(self) -> int:
        return self._server.pid

    def log_text(self) -> str:
        return self._server.log_text()

    def post(self, path: str, json: object | None = None) -> httpx.Response:
        return self.client.post(path, json=json)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def put(self, path: str, json: object | None = None) -> httpx.Response:
        return self.client.put(path, json=json)

    def delete(self, path: str) -> httpx.Response:
        return self.client.delete(path)

    def metrics(self) -> dict[str, float]:
        """``/metrics`` by name; values that differ in labels only are summed."""
        text = self.client.get("/metrics").raise_for_status().text
        values: dict[str, float] = {}
        for name, value in _METRIC.findall(text):
            values[name] = values.get(name, 0.0) + float(value)
        return values

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 4,
        hint: Mapping[str, object] | None = None,
        **fields: object,
    ) -> dict[str, Any]:
        """One greedy completion with its token ids; any error fails the test."""
        body: dict[str, object] = {
            "model": MODEL_NAME,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        if hint is not None:
            body["agent_hint"] = dict(hint)
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def stats(self) -> dict[str, Any]:
        answer = self.get("/v1/agent/stats")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def reset_prefix_cache(self) -> None:
        answer = self.post("/reset_prefix_cache")
        assert answer.status_code == 200, answer.text


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Prompt tokens that the server took from its cache."""
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"] or 0)


def leak_check(server: LiveServer) -> None:
    """Free the sessions the test left, then assert that nothing is held any more."""
    wait_until_idle(server)
    free_all_sessions(server)
    wait_until_idle(server)  # a store is told as well
    stats = server.stats()
    held = {name: stats[name] for name in HELD if stats[name]}
    held |= {name: stats[name] for name in HELD_BY_TIER if stats.get(name)}
    assert not held, f"still held: {held}"
    assert stats["free_blocks"] == stats["total_blocks"], stats


def wait_until_idle(server: LiveServer) -> None:
    """An aborted request ends a moment after its client has gone, a copy likewise."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        metrics = server.metrics()
        stats = server.stats()
        busy = {
            "running": metrics.get("vllm:num_requests_running", 0.0),
            "waiting": metrics.get("vllm:num_requests_waiting", 0.0),
            **{name: stats.get(name, 0) for name in _BUSY},
        }
        if not any(busy.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"still busy after {_SETTLE_S:.0f} s: {busy}")


def free_all_sessions(server: LiveServer) -> None:
    while True:
        sessions = server.get("/v1/agent/sessions?limit=1000").json()["sessions"]
        if not sessions:
            return
        for session in sessions:
            path = quote(session["session_id"], safe="")
            server.delete(f"/v1/agent/sessions/{path}?tree=true")


def _base_args(num_blocks: int) -> list[str]:
    return [
        *("--served-model-name", MODEL_NAME),
        *("--dtype", "float32"),
        *("--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(num_blocks)),
        *("--max-model-len", str(min(4096, (num_blocks - 1) * BLOCK_SIZE))),
        *("--max-num-seqs", "16"),
        *("--max-num-batched-tokens", "2048"),
        *("--uvicorn-log-level", "warning"),
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]


def _log_path() -> Path:
    return CACHE_DIR / "live" / f"server-{os.getpid()}-{next(_numbers)}.log"
