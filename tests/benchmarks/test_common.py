from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common import (
    REPO_ROOT,
    GuardedProcess,
    ServerError,
    VllmServer,
    free_port,
    machine,
    sam_flags,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
#: Starts a child of its own, then says both process ids and sleeps.
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, os, time\n"
    f"child = subprocess.Popen({SLEEP!r})\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(600)",
]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition: object) -> None:
    assert callable(condition)
    while not condition():
        time.sleep(0.02)


def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = GuardedProcess(PARENT, log_path=log, env=os.environ)
    wait_for(lambda: len(log.read_text().split()) == 2)
    pids = [int(pid) for pid in log.read_text().split()]
    assert process.is_running
    assert process.pid == pids[0]
    process.kill()
    assert not process.is_running
    wait_for(lambda: not any(map(is_alive, pids)))
    process.kill()


def test_the_group_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    """A test run that is killed hard must leave no server behind."""
    log = tmp_path / "log"
    code = (
        "import os, pathlib, time\n"
        "from benchmarks.common import GuardedProcess\n"
        f"GuardedProcess({PARENT!r}, log_path=pathlib.Path({str(log)!r}), "
        "env=os.environ)\n"
        "time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=REPO_ROOT)
    wait_for(lambda: log.exists() and len(log.read_text().split()) == 2)
    pids = [int(pid) for pid in log.read_text().split()]
    assert all(map(is_alive, pids))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_server_that_exits_shows_its_log(tmp_path: Path) -> None:
    server = VllmServer(tmp_path, ["--urk"], log_path=tmp_path / "log")
    server._command = [sys.executable, "-c", "raise SystemExit('no such flag')"]
    with pytest.raises(ServerError, match=r"exited; end of .*\nno such flag"):
        server.launch().wait_healthy()
    assert not server.is_running


def test_a_server_that_hangs_is_stopped(tmp_path: Path) -> None:
    server = VllmServer(tmp_path, [], log_path=tmp_path / "log", start_timeout_s=0.3)
    server._command = SLEEP
    with pytest.raises(ServerError, match="did not become healthy"):
        server.launch().wait_healthy()
    assert not server.is_running


def test_a_server_never_launched_can_be_stopped(tmp_path: Path) -> None:
    server = VllmServer(tmp_path, [], log_path=tmp_path / "log")
    server.stop()
    assert server.log_text() == ""


def test_free_ports_differ_from_one_in_use() -> None:
    assert 0 < free_port() < 65536


@pytest.mark.parametrize("by_module_path", [False, True])
def test_the_two_flags(by_module_path: bool) -> None:
    flags = sam_flags({"sam": "shadow"}, by_module_path=by_module_path)
    assert flags[0] == "--kv-transfer-config"
    assert flags[2:] == ["--middleware", "sam_connector.AgentHintMiddleware"]
    transfer = json.loads(flags[1])
    assert transfer["kv_connector"] == "SAMConnector"
    assert transfer["kv_connector_extra_config"] == {"sam": "shadow"}
    assert ("kv_connector_module_path" in transfer) is by_module_path


def test_machine_names_what_a_number_belongs_to() -> None:
    assert set(machine()) == {"cpu", "cores", "python"}
