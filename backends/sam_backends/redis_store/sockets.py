"""redis-py's connections with deadlines: whatever it does on a socket ends by then.

A timeout of redis-py's own is for one system call; a server that answers byte by byte
exceeds it without end. Here the deadline is that of the calling thread, and every call
on the socket gets what is left of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

#: Where there is no deadline: closing, and what a pool does on its own.
DEFAULT_TIMEOUT_S = 0.5

_thread = threading.local()


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """Sets the calling thread's deadline, ``time.monotonic()`` seconds."""
    before = getattr(_thread, "deadline", None)
    _thread.deadline = deadline
    try:
        yield
    finally:
        _thread.deadline = before


def seconds_left() -> float:
    """Of the calling thread's deadline.

    Raises:
        TimeoutError: there are none.
    """
    deadline: float | None = getattr(_thread, "deadline", None)
    if deadline is None:
        return DEFAULT_TIMEOUT_S
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


class DeadlineSocket:
    """A socket whose every call ends by the calling thread's deadline.

    Args:
        raw: a socket, plain or TLS.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._timeout_s: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def settimeout(self, timeout_s: float | None) -> None:
        """Another bound besides the deadline; 0 polls, as ever."""
        self._timeout_s = timeout_s

    def recv(self, *args: Any) -> Any:
        self._arm()
        return self.raw.recv(*args)

    def recv_into(self, *args: Any) -> Any:
        self._arm()
        return self.raw.recv_into(*args)

    def send(self, *args: Any) -> Any:
        self._arm()
        return self.raw.send(*args)

    def sendall(self, *args: Any) -> Any:
        self._arm()
        return self.raw.sendall(*args)

    def _arm(self) -> None:
        timeout_s = self._timeout_s
        if timeout_s != 0:
            left = seconds_left()
            timeout_s = left if timeout_s is None else min(left, timeout_s)
        self.raw.settimeout(timeout_s)


class _WithDeadline:
    """Goes before a connection of redis-py among the bases."""

    socket_timeout: float | None
    socket_connect_timeout: float | None

    def _connect(self) -> Any:
        timeouts = self.socket_timeout, self.socket_connect_timeout
        left = seconds_left()
        try:
            # Of use for the handshake of TLS, which this socket does not see.
            self.socket_timeout, self.socket_connect_timeout = (
                left if limit is None else min(limit, left) for limit in timeouts
            )
            return DeadlineSocket(super()._connect())  # type: ignore[misc]
        finally:
            self.socket_timeout, self.socket_connect_timeout = timeouts


class TcpConnection(_WithDeadline, Connection):
    """Plain TCP."""


class UnixConnection(_WithDeadline, UnixDomainSocketConnection):
    """A unix socket."""


class TlsConnection(_WithDeadline, SSLConnection):
    """TLS over TCP."""


class SentinelTcpConnection(_WithDeadline, SentinelManagedConnection):
    """To the master that the sentinels name."""


class SentinelTlsConnection(_WithDeadline, SentinelManagedSSLConnection):
    """The same with TLS."""
