"""Real servers on loopback, started and ended by the tests that need them."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

_START_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

NUM_CLUSTER_NODES = 3
_NUM_SLOTS = 16_384

#: Where a deadline is not what is tested.
LONG_S = 15.0


def redis_binary() -> str:
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed")
    return path


def free_port() -> int:
    """A port that was free a moment ago; below 55,536, as a cluster needs it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_536:
            return port


@dataclass
class Server:
    """One server process.

    Attributes:
        directory: of its own.
        arguments: of its command line.
        admin: makes a client that may do everything.
        port: on 127.0.0.1; 0 if it has none.
    """

    directory: Path
    arguments: Sequence[str]
    admin: Callable[[], redis.Redis]
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        if self.port:
            return f"redis://127.0.0.1:{self.port}"
        return f"unix://{self.directory / 'redis.sock'}"

    @property
    def socket_path(self) -> Path:
        return self.directory / "redis.sock"

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [redis_binary(), *self.arguments],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                # Whatever becomes of the tests, no server stays behind.
                preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        wait_until(self._answers, f"a server at {self.url}")

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Ends it and starts it empty."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """It accepts connections, as the kernel does that, and stays silent."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def do(self, *command: Any) -> Any:
        """One command, as an administrator."""
        with self.admin() as client:
            return client.execute_command(*command)

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            log = (self.directory / "log").read_text(errors="replace")
            raise AssertionError(f"a server did not start: {log[-500:]}")
        try:
            return bool(self.do("PING"))
        except redis.ConnectionError:
            return False


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _START_S
    while not is_true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {_START_S:.0f} s: {what}")
        time.sleep(0.02)


@contextmanager
def redis_server(directory: Path, **config: str | int) -> Iterator[Server]:
    """Redis on TCP and a unix socket; ``config`` has ``_`` for ``-``."""
    port = free_port()
    arguments = [*_arguments(port, config), "--unixsocket", "redis.sock"]
    password = str(config.get("requirepass", "")) or None

    def admin() -> redis.Redis:
        return redis.Redis(port=port, password=password)

    with _running(directory, arguments, admin, port) as server:
        yield server


@contextmanager
def tls_server(directory: Path, user: str, password: str) -> Iterator[Server]:
    """TLS and nothing else, for one user and no default user."""
    make_certificates(directory)
    port = free_port()
    arguments = [
        *_arguments(0, {}),
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", "server.crt", "--tls-key-file", "server.key"),
        *("--tls-ca-cert-file", "ca.crt"),
        *("--user", user, "on", f">{password}", "~*", "&*", "+@all"),
        *("--user", "default", "off"),
    ]

    def admin() -> redis.Redis:
        return redis.Redis(
            port=port,
            username=user,
            password=password,
            ssl=True,
            ssl_ca_certs=str(directory / "ca.crt"),
        )

    with _running(directory, arguments, admin, port) as server:
        yield server


@dataclass(frozen=True)
class SentinelGroup:
    """A master, its replica and who watches them."""

    master: Server
    replica: Server
    sentinel: Server

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/sam"


@contextmanager
def sentinel_group(directory: Path) -> Iterator[SentinelGroup]:
    with ExitStack() as stack:
        enter = stack.enter_context
        master = enter(redis_server(_sub(directory, "master")))
        replica = enter(
            redis_server(
                _sub(directory, "replica"),
                replicaof=f"127.0.0.1 {master.port}",
                repl_diskless_sync_delay=0,
            )
        )
        home, port = _sub(directory, "sentinel"), free_port()
        (home / "sentinel.conf").write_text(
            f"bind 127.0.0.1\nport {port}\n"
            f"sentinel monitor sam 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds sam 500\n"
            "sentinel failover-timeout sam 3000\n"
        )
        sentinel = enter(_running(home, ["sentinel.conf", "--sentinel"], port=port))
        wait_until(
            lambda: replica.do("INFO", "replication")["master_link_status"] == "up",
            "a replica in step",
        )
        wait_until(
            lambda: bool(sentinel.do("SENTINEL", "REPLICAS", "sam")),
            "a sentinel that knows the replica",
        )
        yield SentinelGroup(master, replica, sentinel)


@dataclass(frozen=True)
class Cluster:
    """Three masters, each with a third of the slots."""

    nodes: Sequence[Server]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def move_slot(self, slot: int, source: int, target: int) -> None:
        """Gives a slot with all its keys to another node."""
        ids = [node.do("CLUSTER", "MYID").decode() for node in self.nodes]
        self.nodes[target].do("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        self.nodes[source].do("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        keys = self.nodes[source].do("CLUSTER", "GETKEYSINSLOT", slot, 1_000)
        if keys:
            port = self.nodes[target].port
            self.nodes[source].do(
                *("MIGRATE", "127.0.0.1", port, "", 0, 5_000, "KEYS", *keys)
            )
        for node in (self.nodes[target], self.nodes[source]):
            node.do("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                redis_server(
                    _sub(directory, f"node{n}"),
                    cluster_enabled="yes",
                    cluster_node_timeout=2_000,
                )
            )
            for n in range(NUM_CLUSTER_NODES)
        ]
        bounds = [n * _NUM_SLOTS // len(nodes) for n in range(len(nodes) + 1)]
        for n, node in enumerate(nodes):
            node.do("CLUSTER", "ADDSLOTSRANGE", bounds[n], bounds[n + 1] - 1)
            node.do("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            node.do("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            wait_until(lambda node=node: _is_complete(node), "a complete cluster")
        yield Cluster(nodes)


def make_certificates(directory: Path) -> None:
    """``ca.crt``, and ``server.crt`` and ``server.key`` for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")

    def openssl(*arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt"),
        *("-days", "2", "-subj", "/CN=test authority"),
    )
    openssl(
        *("req", *new_key, "-keyout", "server.key", "-out", "server.csr"),
        *("-subj", "/CN=localhost"),
    )
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-out", "server.crt", "-days", "2", "-extfile", "names"),
    )


def _sub(directory: Path, name: str) -> Path:
    path = directory / name
    path.mkdir()
    return path


def _arguments(port: int, config: dict[str, str | int]) -> list[str]:
    settings = {
        "bind": "127.0.0.1",
        "port": port,
        "save": "",
        "appendonly": "no",
        **config,
    }
    return [
        text
        for name, value in settings.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


@contextmanager
def _running(
    directory: Path,
    arguments: Sequence[str],
    admin: Callable[[], redis.Redis] | None = None,
    port: int = 0,
) -> Iterator[Server]:
    server = Server(
        directory, arguments, admin or (lambda: redis.Redis(port=port)), port
    )
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _is_complete(node: Server) -> bool:
    info = node.do("CLUSTER INFO")
    return (
        info["cluster_state"] == "ok"
        and int(info["cluster_known_nodes"]) == NUM_CLUSTER_NODES
    )
