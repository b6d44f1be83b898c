"""What the benchmarks and the live tests share: paths, ports, a real vLLM server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

REPO_ROOT = Path(__file__).resolve().parent.parent
CACHE_DIR = REPO_ROOT / ".cache"
TRACES_DIR = Path(__file__).resolve().parent / "traces"
RESULTS_DIR = CACHE_DIR / "results"

#: For a machine without a GPU; an engine with one ignores the CPU settings. Threads
#: that spin while they wait cost a factor of five as soon as anything shares the CPU.
SERVER_ENV: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerError(RuntimeError):
    """The server died or never answered; carries the end of its log."""


def free_port() -> int:
    """A TCP port nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sam_flags(
    config: Mapping[str, object] | None = None, *, by_module_path: bool = False
) -> list[str]:
    """The two flags that turn a stock server into ours.

    Args:
        config: settings of the connector.
        by_module_path: name the connector's module instead of relying on the
            installed entry point.
    """
    transfer: dict[str, object] = {
        "kv_connector": "SAMConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(config or {}),
    }
    if by_module_path:
        transfer["kv_connector_module_path"] = "sam_connector.connector"
    return [
        "--kv-transfer-config",
        json.dumps(transfer),
        "--middleware",
        "sam_connector.AgentHintMiddleware",
    ]


class GuardedProcess:
    """A process group that ends with this process, however this process ends.

    Args:
        command: program and arguments.
        log_path: file for its output.
        env: its whole environment.
    """

    def __init__(
        self, command: Sequence[str], *, log_path: Path, env: Mapping[str, str]
    ) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log_path.open("wb")
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=REPO_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # The guard reads a pipe whose other end only this process holds: when this
        # process is gone, killed or not, the pipe closes and the guard kills the group.
        self._guard = subprocess.Popen(
            ["sh", "-c", f"cat >/dev/null; kill -9 -{self._process.pid}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the whole group; safe to call again."""
        # The group first: a second signal may cut this short, and the guard, which
        # then still lives, would find nothing left to do.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._guard.kill()
        self._guard.communicate()
        self._process.wait()
        self._log.close()


class VllmServer:
    """One real vLLM API server on a free local port.

    Use it as a context manager, or call ``launch``, ``wait_healthy`` and ``stop``.

    Args:
        model: folder of the model.
        args: further command line arguments of the server.
        env: variables added to the environment.
        log_path: file for the server's output.
        port: a free one unless given.
        start_timeout_s: how long to wait for ``/health``.
    """

    def __init__(
        self,
        model: Path,
        args: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        start_timeout_s: float = 240.0,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._env = {**os.environ, **SERVER_ENV, **_import_path(), **(env or {})}
        self._command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *("--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *args,
        ]
        self._process: GuardedProcess | None = None

    def launch(self) -> Self:
        """Start the process and return at once."""
        self._process = GuardedProcess(
            self._command, log_path=self.log_path, env=self._env
        )
        return self

    def wait_healthy(self) -> Self:
        """Block until ``/health`` answers.

        Raises:
            ServerError: it exited, or the time is over.
        """
        deadline = time.monotonic() + self._start_timeout_s
        while self.is_running and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return self
            time.sleep(0.2)
        state = "did not become healthy in time" if self.is_running else "exited"
        self.stop()
        tail = self.log_text()[-6000:]
        raise ServerError(f"the server {state}; end of {self.log_path}:\n{tail}")

    @property
    def pid(self) -> int:
        """The API server's process, which leads the session of all the others."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Kill the server and all its processes; safe to call again."""
        if self._process is not None:
            self._process.kill()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running

    def log_text(self) -> str:
        if not self.log_path.exists():
            return ""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> Self:
        return self.launch().wait_healthy()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _import_path() -> dict[str, str]:
    """Lets the server's processes import this checkout, installed or not."""
    ours = [str(REPO_ROOT), str(REPO_ROOT / "backends")]
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*ours, *([inherited] if inherited else [])])}


def machine() -> dict[str, object]:
    """What a number was measured on."""
    model = "unknown"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
    }
