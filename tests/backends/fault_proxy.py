"""A proxy in front of a Redis that does harm on request, or plays a Redis alone.

    with FaultProxy(("127.0.0.1", 6379)) as proxy:
        proxy.add(Fault(commands=("GET",), cut_after=100, times=1))
        ...  # a client at proxy.url
        proxy.clear()

It takes one command after another from each connection, waits for the server's reply
and passes it on, so that it knows which reply belongs to what. Without a server behind
it, it answers what a connection needs to be made, and nil to everything else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

Address = tuple[str, int] | str | Path

#: Sent by clients to make a connection; no fault without commands applies to them.
_HANDSHAKE = frozenset({"AUTH", "CLIENT", "HELLO", "SELECT"})

#: Time between the bytes of a reply that drips.
_DRIP_S = 0.02
_POLL_S = 0.05


@dataclass(kw_only=True)
class Fault:
    """What goes wrong, and with which commands.

    Attributes:
        commands: names in capitals; all but those that make connections if empty.
        key: must be among the arguments.
        times: how often, then no more; without end if negative.
        reply: instead of the server's, whole, with CRLF; it is not asked then.
        delay_s: before the reply.
        cut_after: closes the connection after so many bytes of the reply.
        flip_at: inverts the byte of the reply there; negative from its end.
        is_silent: never replies, and keeps the connection.
        drips: sends a byte of the reply now and then.
    """

    commands: Sequence[str] = ()
    key: bytes = b""
    times: int = -1
    reply: bytes | None = None
    delay_s: float = 0.0
    cut_after: int | None = None
    flip_at: int | None = None
    is_silent: bool = False
    drips: bool = False

    def applies_to(self, command: Sequence[bytes]) -> bool:
        name = command[0].decode().upper()
        named = self.commands
        is_meant = name in named if named else name not in _HANDSHAKE
        has_key = not self.key or self.key in command
        return is_meant and has_key and self.times != 0


def error(text: str) -> bytes:
    """An error reply, such as ``error("OOM command not allowed")``."""
    return b"-%b\r\n" % text.encode()


class FaultProxy:
    """See the module. Faults may be changed at any time.

    Args:
        upstream: a server: host and port, or the path of a unix socket; ``None`` to
            play one.
        path: of a unix socket to listen on; a port of 127.0.0.1 by default.
    """

    def __init__(
        self, upstream: Address | None = None, *, path: Path | None = None
    ) -> None:
        self._upstream = upstream
        self._path = path
        self._port = 0
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_ending = False
        #: Commands seen, in the order in which they came.
        self.commands: list[list[bytes]] = []
        self.num_connections = 0

    @property
    def url(self) -> str:
        if self._path is not None:
            return f"unix://{self._path}"
        return f"redis://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += faults

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def refuse(self) -> None:
        """Listens no more and cuts every connection, as if nothing were there."""
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut(listener)
        self.cut()

    def cut(self) -> None:
        """Cuts every connection there is."""
        with self._lock:
            sockets = list(self._open)
        for each in sockets:
            _shut(each, close=False)

    def accept(self) -> None:
        """Listens, again where it did before."""
        if self._listener is not None:
            return
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self._path))
        else:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
            self._port = listener.getsockname()[1]
        listener.listen(64)
        self._listener = listener
        self._run(self._serve_listener, listener)

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        self.refuse()
        for thread in self._threads:
            thread.join()

    # --- threads ------------------------------------------------------------------

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _serve_listener(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.num_connections += 1
            if self._path is None:
                # Replies are sent one by one; the kernel must not collect them.
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        upstream = None
        try:
            self._keep(client)
            if self._upstream is not None:
                upstream = self._connect(self._upstream)
                self._keep(upstream)
            self._pass_on(client, upstream)
        except (OSError, EOFError):
            pass
        finally:
            for each in (client, upstream):
                if each is not None:
                    with self._lock:
                        self._open.discard(each)
                    _shut(each)

    def _pass_on(self, client: socket.socket, upstream: socket.socket | None) -> None:
        requests = client.makefile("rb")
        replies = upstream.makefile("rb") if upstream is not None else None
        with requests:
            try:
                while (raw := _read_item(requests)) is not None:
                    command = _parse(raw)
                    self.commands.append(command)
                    fault = self._fault_for(command)
                    if fault and fault.reply is not None:
                        reply = fault.reply
                    elif upstream is None:
                        reply = _own_reply(command)
                    else:
                        upstream.sendall(raw)
                        found = _read_item(replies)
                        if found is None:
                            return
                        reply = found
                    if not self._deliver(client, reply, fault):
                        return
            finally:
                if replies is not None:
                    replies.close()

    def _deliver(
        self, client: socket.socket, reply: bytes, fault: Fault | None
    ) -> bool:
        if fault is None:
            client.sendall(reply)
            return True
        if fault.is_silent:
            self._wait(1e9)
            return False
        self._wait(fault.delay_s)
        if fault.flip_at is not None:
            changed = bytearray(reply)
            changed[fault.flip_at] ^= 0xFF
            reply = bytes(changed)
        if fault.drips:
            for n in range(len(reply)):
                client.sendall(reply[n : n + 1])
                self._wait(_DRIP_S)
            return True
        if fault.cut_after is not None:
            client.sendall(reply[: fault.cut_after])
            return False
        client.sendall(reply)
        return True

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_ending and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))

    def _fault_for(self, command: Sequence[bytes]) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.applies_to(command):
                    if fault.times > 0:
                        fault.times -= 1
                    return fault
        return None

    def _keep(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)

    def _connect(self, address: Address) -> socket.socket:
        if isinstance(address, tuple):
            return socket.create_connection(address, timeout=10)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(address))
        except OSError:
            sock.close()
            raise
        return sock


def _shut(sock: socket.socket, *, close: bool = True) -> None:
    # A thread that waits for it wakes up by this and not by close().
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    if close:
        sock.close()


def _own_reply(command: Sequence[bytes]) -> bytes:
    name = command[0].decode().upper()
    if name == "PING":
        return b"+PONG\r\n"
    return b"+OK\r\n" if name in _HANDSHAKE else b"$-1\r\n"


def _read_item(stream) -> bytes | None:  # type: ignore[no-untyped-def]
    """One command or reply of RESP2, as it is; ``None`` at the end."""
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        return None
    parts = [line]
    count = int(line[1:]) if line[:1] in b"$*" else -1
    if line[:1] == b"$" and count >= 0:
        data = stream.read(count + 2)
        if len(data) < count + 2:
            return None
        parts.append(data)
    elif line[:1] == b"*":
        for _ in range(count):
            item = _read_item(stream)
            if item is None:
                return None
            parts.append(item)
    return b"".join(parts)


def _parse(raw: bytes) -> list[bytes]:
    """The arguments of a command."""
    arguments, start = [], raw.index(b"\n") + 1
    while start < len(raw):
        end = raw.index(b"\r\n", start)
        length = int(raw[start + 1 : end])
        arguments.append(raw[end + 2 : end + 2 + length])
        start = end + 4 + length
    return arguments
