"""Start, reset, pause and end of a real engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.common import REPO_ROOT, SERVER_ENV, ServerError
from benchmarks.demo.model import ensure_model
from tests.live.endpoints import COMPLETIONS, body_of, session_of, session_path
from tests.live.processes import processes_of, shared_memory_of
from tests.live.server import TEST_MODEL, LiveServer, cached_tokens, leak_check

LEASE = {"cache_control": {"ttl": 600}}
PROMPT = list(range(100, 400))
#: A process that needs longer hangs.
EXIT_S = 15 * float(os.environ.get("SAM_TEST_TIMEOUT_FACTOR", "1"))
OFFLINE_S = 240

EVICT_AND_PREFETCH = {"edits": [{"type": "evict"}, {"type": "prefetch"}]}


# --- reset and pause ------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?reset_external=true"], ids=["gpu", "external"])
def test_sessions_forget_what_a_reset_has_dropped(
    live_server: LiveServer, query: str
) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    live_server.complete(PROMPT + [7] * 64, hint={"session_id": "t", **LEASE})
    answer = live_server.post(f"/reset_prefix_cache{query}")
    assert answer.json() == {"success": True}
    stats = live_server.stats()
    for name in ("sessions", "records", "timers", "claimed_blocks", "protected_blocks"):
        assert stats[name] == 0
    assert session_of(live_server, "s") is None
    assert cached_tokens(live_server.complete(PROMPT)) == 0


def test_session_begins_anew_after_a_reset(live_server: LiveServer) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    live_server.reset_prefix_cache()
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    session = session_of(live_server, "s")
    assert session is not None
    assert session["blocks"]["gpu"] == 9
    leak_check(live_server)


def test_reset_that_drops_running_requests(live_server: LiveServer) -> None:
    """The requests are preempted, lose their blocks, and go on from the start."""
    body = body_of(COMPLETIONS, max_tokens=300) | {"stream": True, "ignore_eos": True}
    body["agent_hint"] = {"session_id": "s", **LEASE}
    with live_server.client.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        query = "?reset_running_requests=true&reset_external=true"
        reset = live_server.post(f"/reset_prefix_cache{query}")
        assert reset.json() == {"success": True}
        assert sum(line.startswith("data: {") for line in lines) > 200
    session = session_of(live_server, "s")
    assert session is not None
    assert session["running_requests"] == 0
    assert session["blocks"]["gpu"] > 9


@pytest.mark.parametrize(
    ("query", "is_cleared"),
    [("", True), ("?mode=keep&clear_cache=false", False)],
    ids=["clears", "keeps"],
)
def test_pause_and_resume(
    live_server: LiveServer, query: str, is_cleared: bool
) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    assert live_server.post(f"/pause{query}").status_code == 200
    try:
        # Nothing is moved meanwhile, and the engine goes on answering.
        path = f"{session_path('s')}/edits"
        results = live_server.post(path, EVICT_AND_PREFETCH).json()["results"]
        assert [result["status"] for result in results] == ["rejected"] * 2
        assert live_server.stats()["internal_errors"] == 0
        assert (session_of(live_server, "s") is None) == is_cleared
    finally:
        assert live_server.post("/resume").status_code == 200
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    assert session_of(live_server, "s") is not None


# --- start ----------------------------------------------------------------------------


def test_wrong_settings_stop_the_start_and_are_all_named() -> None:
    server = LiveServer(config={"sam": "maybe", "max_edits": 0, "idle_ttl": 5})
    try:
        with pytest.raises(ServerError, match="exited"):
            server.start()
        log = server.log_text()
        assert "sam must be one of off, shadow, on; got 'maybe'" in log
        assert "max_edits must be at least 1; got 0" in log
        assert "unknown key 'idle_ttl'" in log
        assert processes_of(server.pid) == []
    finally:
        server.stop()


def test_s03_no_shared_memory_but_that_of_vllm(
    live_server: LiveServer, stock_server: LiveServer
) -> None:
    """A killed server leaves none of ours, because there is none."""
    assert _kinds(live_server) == _kinds(stock_server)


def _kinds(server: LiveServer) -> set[str]:
    """Names of shared memory without their random parts."""
    return {re.split(r"[_-]", path.name)[0] for path in shared_memory_of(server.pid)}


# --- end ------------------------------------------------------------------------------


@pytest.fixture
def doomed_server() -> Iterator[LiveServer]:
    with LiveServer() as server:
        yield server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_s04_signal_ends_every_process_of_the_server(
    doomed_server: LiveServer, number: signal.Signals
) -> None:
    """With sessions, leases and a running request."""
    server = doomed_server
    server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    body = body_of(COMPLETIONS, max_tokens=2000) | {"stream": True, "ignore_eos": True}
    body["agent_hint"] = {"session_id": "running", **LEASE}
    with server.client.stream("POST", COMPLETIONS, json=body) as answer:
        next(answer.iter_lines())
        assert len(processes_of(server.pid)) >= 2
        shared_memory = shared_memory_of(server.pid)
        os.kill(server.pid, number)
    deadline = time.monotonic() + EXIT_S
    while (left := processes_of(server.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert [path for path in shared_memory if path.exists()] == []
    assert "hints are off after" not in server.log_text()


@pytest.mark.parametrize("is_multiprocess", [True, False], ids=["mp", "uni"])
def test_s06_offline_script_ends_by_itself(is_multiprocess: bool) -> None:
    """With processes for engine and worker; and (S10) all in one."""
    model = str(ensure_model(TEST_MODEL))
    script = subprocess.run(
        [sys.executable, "-m", "tests.live.offline", model],
        cwd=REPO_ROOT,
        env={
            **os.environ,
            **SERVER_ENV,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_multiprocess)),
        },
        capture_output=True,
        text=True,
        timeout=OFFLINE_S,
        check=False,
    )
    assert script.returncode == 0, script.stderr[-4000:]
    # Processes of the engine write to the same output.
    (line,) = [x for x in script.stdout.splitlines() if x.startswith('{"session"')]
    told = json.loads(line)
    assert told["session"]["session_id"] == "offline"
    assert told["session"]["lease_s"] > 0
    assert told["session"]["blocks"]["gpu"] == 6
    assert told["stats"]["running_requests"] == 0
    (result,) = told["kv_transfer_params"]["agent_hint"]["results"]
    assert result["status"] == "unsupported"
