"""One connection to a standalone server: RESP2 over a plain blocking socket.

Bytes go from the caller's buffers to the socket (``sendmsg``) and from the socket to
the caller's buffers (``recvmsg_into``) without a copy in Python. Deadlines are the
socket's own timeouts (``SO_RCVTIMEO``): with ``settimeout`` a Python socket is
non-blocking inside, and ``MSG_WAITALL`` has no effect.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sam_backends.redis_store.failures import reply_of_error
from sam_backends.redis_store.runner import Argument, Reply

#: Received at a time where small replies are expected.
_REPLY_BYTES = 65_536

#: Most buffers in one system call.
_MAX_BUFFERS = 512

#: A value of another length than expected is read and thrown away up to this size.
_MAX_DRAIN_BYTES = 8 << 20

#: Nothing longer is taken where no value is expected: the largest manifest and more.
_MAX_REPLY_BYTES = 17 << 20

#: What a kernel sends over a unix socket in one piece.
_UNIX_PIECE_BYTES = 32 << 10

#: Elements of an array: we ask for none with more.
_MAX_ELEMENTS = 16


class LinkError(Exception):
    """The connection is in no certain state and must be closed."""


class ValueTooLong(LinkError):
    """What is there has another length than it could, and is not worth reading."""


class Link:
    """A connection. One thread at a time.

    Args:
        connection: of redis-py, connected and authenticated, with a
            ``DeadlineSocket``. What is below that is ours.

    Raises:
        LinkError: from every method, with which the connection is of no more use.
        TimeoutError: the same, because the deadline has passed.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection  # keeps the socket open
        self._socket: socket.socket = connection._sock.raw
        self._socket.settimeout(None)
        self._is_unix = self._socket.family == socket.AF_UNIX
        self._buffer = bytearray()
        self.deadline = 0.0
        self.is_new = True

    def close(self) -> None:
        self._connection.disconnect()

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Sends all of ``buffers``."""
        views = [memoryview(buffer) for buffer in buffers]
        start = 0
        while start < len(views):
            num_sent = self._send(views[start : start + _MAX_BUFFERS])
            while start < len(views) and num_sent >= len(views[start]):
                num_sent -= len(views[start])
                start += 1
            if num_sent:
                views[start] = views[start][num_sent:]

    def receive(self) -> Reply:
        """One small reply."""
        line = self._line(_REPLY_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return reply_of_error(rest.decode("utf-8", "replace"))
        if kind == b"+":
            return bytes(rest)
        if kind == b":":
            return self._int(rest)
        if kind == b"$":
            length = self._int(rest)
            if length < 0:
                return None
            if length > _MAX_REPLY_BYTES:
                raise ValueTooLong(f"a reply of {length} bytes")
            data = bytearray(length + 2)
            self._fill([memoryview(data)])
            return bytes(data[:length])
        raise LinkError(f"a reply that begins with {bytes(line[:20])!r}")

    def receive_all(self) -> list[Reply]:
        """One reply that is an array of small ones, or an error."""
        line = self._line(_REPLY_BYTES)
        if line[:1] == b"-":
            return [reply_of_error(line[1:].decode("utf-8", "replace"))]
        count = self._int(line[1:])
        if line[:1] != b"*" or not 0 <= count <= _MAX_ELEMENTS:
            raise LinkError(f"a reply that begins with {bytes(line[:20])!r}")
        return [self.receive() for _ in range(count)]

    def receive_into(self, buffers: Sequence[memoryview], num_bytes: int) -> Reply:
        """A value of exactly ``num_bytes``: 1; ``None`` if it is not, or missing."""
        # Exactly the line that is expected, so that nothing of the value comes with it:
        # what is received in one piece goes to aligned memory.
        line = self._line(len(b"$%d\r\n" % num_bytes))
        if line[:1] == b"-":
            return reply_of_error(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise LinkError(f"a reply that begins with {bytes(line[:20])!r}")
        length = self._int(line[1:])
        if length < 0:
            return None
        if length != num_bytes:
            self._drain(length + 2)
            return None
        end = bytearray(2)
        self._fill([*buffers, memoryview(end)])
        if end != b"\r\n":
            raise LinkError("a value does not end where it should")
        return 1

    # --- internals ----------------------------------------------------------------

    def _send(self, views: Sequence[memoryview]) -> int:
        """Returns how many bytes were sent."""
        self._arm(socket.SO_SNDTIMEO)
        try:
            if not self._is_unix:
                return self._socket.sendmsg(views)
            # Here the timeout is for each piece that the kernel makes of what it is
            # given: only one may wait.
            try:
                return self._socket.sendmsg(views, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return self._socket.send(views[0][:_UNIX_PIECE_BYTES])
        except BlockingIOError as error:
            raise TimeoutError from error
        except OSError as error:
            raise LinkError(str(error)) from error

    def _line(self, num_bytes: int) -> bytearray:
        """The next line, without its end."""
        buffer = self._buffer
        while (end := buffer.find(b"\r\n")) < 0:
            if len(buffer) > _REPLY_BYTES:
                raise LinkError("a line without an end")
            buffer += self._receive(num_bytes)
        line = buffer[:end]
        del buffer[: end + 2]
        return line

    def _receive(self, num_bytes: int) -> bytes:
        self._arm(socket.SO_RCVTIMEO)
        try:
            data = self._socket.recv(num_bytes)
        except BlockingIOError as error:
            raise TimeoutError from error
        except OSError as error:
            raise LinkError(str(error)) from error
        if not data:
            raise LinkError("the server has closed the connection")
        return data

    def _fill(self, buffers: Iterable[memoryview]) -> None:
        """Receives until all of ``buffers`` are full."""
        views = list(buffers)
        start = 0
        while self._buffer and start < len(views):
            view = views[start]
            num_bytes = min(len(view), len(self._buffer))
            view[:num_bytes] = self._buffer[:num_bytes]
            del self._buffer[:num_bytes]
            views[start] = view[num_bytes:]
            start += not len(views[start])
        while start < len(views):
            self._arm(socket.SO_RCVTIMEO)
            try:
                num_bytes, *_ = self._socket.recvmsg_into(
                    views[start : start + _MAX_BUFFERS], 0, socket.MSG_WAITALL
                )
            except BlockingIOError as error:
                raise TimeoutError from error
            except OSError as error:
                raise LinkError(str(error)) from error
            if not num_bytes:
                raise LinkError("the server has closed the connection")
            while start < len(views) and num_bytes >= len(views[start]):
                num_bytes -= len(views[start])
                start += 1
            if num_bytes:
                views[start] = views[start][num_bytes:]

    def _drain(self, num_bytes: int) -> None:
        if num_bytes > _MAX_DRAIN_BYTES:
            raise ValueTooLong(f"a value of {num_bytes - 2} bytes is none of ours")
        self._fill([memoryview(bytearray(num_bytes))])

    def _int(self, digits: bytes | bytearray) -> int:
        try:
            return int(digits)
        except ValueError as error:
            raise LinkError(f"a reply that should be a number: {digits!r}") from error

    def _arm(self, option: int) -> None:
        """Lets the next system call wait no longer than the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        micros = max(1, int(left * 1e6))
        self._socket.setsockopt(
            socket.SOL_SOCKET,
            option,
            struct.pack("@ll", micros // 1_000_000, micros % 1_000_000),
        )


def encode(command: Sequence[Argument]) -> bytes:
    """A command on the wire."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
