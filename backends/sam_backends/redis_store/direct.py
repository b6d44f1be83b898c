"""The way to a standalone server over TCP or a unix socket: sockets of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis.exceptions
from typing_extensions import override

from sam_backends.redis_store.link import Link, LinkError, encode
from sam_backends.redis_store.runner import (
    Command,
    Reply,
    Runner,
    cut,
    error_of,
    timeout,
)
from sam_backends.redis_store.target import Target
from sam_connector.errors import StoreError, StoreUnavailable
from sam_connector.storage.port import Entry

#: Most bytes of values that are asked for ahead on one connection: large ones come
#: fastest one at a time, small ones only many at a time.
_AHEAD_BYTES = 1 << 20
_MAX_AHEAD = 64

#: Bytes of commands that are sent before their replies are read. The replies fit in
#: the sockets' buffers, so neither side waits for the other.
_MAX_COMMANDS = 1_000

_CLOSED = StoreUnavailable("the store is closed")


class DirectRunner(Runner):
    """Connections as they are needed, as many as there are calls at a time.

    Args:
        target: a standalone server.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._is_closed = False

    @property
    @override
    def has_scripts_over_many_keys(self) -> bool:
        return True

    @override
    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        def work(link: Link, replies: list[Reply]) -> None:
            for start in range(0, len(commands), _MAX_COMMANDS):
                batch = commands[start : start + _MAX_COMMANDS]
                link.send([b"".join(map(encode, batch))])
                replies.extend(link.receive() for _ in batch)

        return self._with_link(len(commands), work, deadline)

    @override
    def write(
        self, entries: Sequence[Entry], ttl_ms: int, deadline: float
    ) -> list[Reply]:
        def work(link: Link, replies: list[Reply]) -> None:
            num_sent = 0
            for entry in entries:
                link.send(_set_command(entry, ttl_ms))
                num_sent += 1
                if num_sent - len(replies) >= _MAX_AHEAD:
                    replies.append(_set_reply(link))
            while len(replies) < num_sent:
                replies.append(_set_reply(link))

        return self._with_link(len(entries), work, deadline)

    @override
    def read(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        def work(link: Link, replies: list[Reply]) -> None:
            sizes = [entry.num_bytes for entry in entries]
            num_asked = num_bytes = 0
            while len(replies) < len(entries):
                asked = []
                while num_asked < len(entries) and (
                    num_asked == len(replies)
                    or (
                        num_bytes + sizes[num_asked] <= _AHEAD_BYTES
                        and num_asked - len(replies) < _MAX_AHEAD
                    )
                ):
                    asked.append(encode(("GET", str(entries[num_asked].key))))
                    num_bytes += sizes[num_asked]
                    num_asked += 1
                if asked:
                    link.send([b"".join(asked)])
                position = len(replies)
                replies.append(
                    link.receive_into(entries[position].buffers, sizes[position])
                )
                num_bytes -= sizes[position]

        return self._with_link(len(entries), work, deadline)

    @override
    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    # --- connections --------------------------------------------------------------

    def _with_link(
        self,
        num_replies: int,
        work: Callable[[Link, list[Reply]], None],
        deadline: float,
    ) -> list[Reply]:
        """Does ``work`` on a connection; what it does not answer has failed.

        A connection that was idle may have been closed by the server; then the work is
        begun anew on a fresh one, if nothing was answered yet.
        """
        replies: list[Reply] = []
        if not num_replies:
            return replies
        for must_be_new in (False, True):
            link, error, is_new = self._take(deadline, must_be_new)
            if link is None:
                break
            error = self._do(link, work, replies, deadline)
            is_stale = not (is_new or replies) and isinstance(error, StoreUnavailable)
            if not is_stale:
                break
        return replies + [error] * (num_replies - len(replies))

    def _do(
        self,
        link: Link,
        work: Callable[[Link, list[Reply]], None],
        replies: list[Reply],
        deadline: float,
    ) -> StoreError | None:
        is_sound = False
        try:
            link.deadline = deadline
            work(link, replies)
            is_sound = True
            return None
        except TimeoutError:
            return timeout()
        except LinkError as error:
            return cut(error)
        finally:
            # One whose replies are not all read would answer the next call with them.
            self._give_back(link, is_sound=is_sound)

    def _take(
        self, deadline: float, must_be_new: bool
    ) -> tuple[Link | None, StoreError | None, bool]:
        if time.monotonic() >= deadline:
            return None, timeout(), True
        with self._lock:
            if self._is_closed:
                return None, _CLOSED, True
            if self._idle and not must_be_new:
                return self._idle.pop(), None, False
        link, error = self._connect(deadline)
        return link, error, True

    def _connect(self, deadline: float) -> tuple[Link | None, StoreError | None]:
        connection: Any = self._target.make_connection()
        left = max(0.001, deadline - time.monotonic())
        connection.socket_connect_timeout = min(connection.socket_connect_timeout, left)
        connection.socket_timeout = min(connection.socket_timeout, left)
        try:
            connection.connect()
            return Link(connection), None
        except redis.exceptions.AuthenticationError as error:
            connection.disconnect()
            return None, error_of(f"NOAUTH {error}")
        except redis.exceptions.TimeoutError:
            connection.disconnect()
            return None, timeout()
        except (redis.exceptions.RedisError, OSError) as error:
            connection.disconnect()
            return None, cut(error)

    def _give_back(self, link: Link, *, is_sound: bool) -> None:
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(link)
                return
        link.close()


def _set_command(entry: Entry, ttl_ms: int) -> list[bytes | memoryview]:
    """Writes it if it is not there, and lets it live so long in any case."""
    key = str(entry.key).encode()
    ttl = b"%d" % ttl_ms
    head = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, entry.num_bytes)
    tail = (b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)) + encode(
        ("PEXPIRE", key, ttl, "GT")
    )
    return [head, *entry.buffers, tail]


def _set_reply(link: Link) -> Reply:
    """1 if the value is there now; the two commands' replies in one."""
    written, lengthened = link.receive(), link.receive()
    if isinstance(written, StoreError):
        return written
    return lengthened if isinstance(lengthened, StoreError) else 1
