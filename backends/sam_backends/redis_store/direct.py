"""The way to a standalone server over TCP or a unix socket: sockets of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

from typing_extensions import override

from sam_backends.redis_store.failures import (
    CLOSED,
    cut,
    error_of_exception,
    timed_out,
)
from sam_backends.redis_store.link import Link, LinkError, ValueTooLong, encode
from sam_backends.redis_store.runner import Command, Reply, Runner
from sam_backends.redis_store.sockets import until
from sam_backends.redis_store.target import Target
from sam_connector.errors import StoreError, StoreUnavailable
from sam_connector.storage.port import Entry

#: Most bytes of values that are asked for ahead on one connection: large ones come
#: fastest one at a time, small ones only many at a time.
_AHEAD_BYTES = 512 << 10
_MAX_AHEAD = 64

#: Bytes that are written ahead of their replies, which are small.
_WRITE_AHEAD_BYTES = 8 << 20

#: Small commands that are sent before their replies are read. The replies fit in the
#: sockets' buffers, so neither side waits for the other.
_MAX_COMMANDS = 1_000

#: A batch of values goes over several connections if each gets so many bytes.
_MIN_SHARE_BYTES = 4 << 20

#: How often a call goes on with what is left after its connection broke.
_MAX_CONNECTIONS_LOST = 3

#: Appends replies to the list, one for each thing that is not in it yet.
_Work: TypeAlias = Callable[[Link, list[Reply]], None]
_Transfer: TypeAlias = Callable[[Sequence[Entry]], list[Reply]]


class DirectRunner(Runner):
    """Connections as they are needed: one for each call, more for large batches.

    Args:
        target: a standalone server.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._is_closed = False
        self._num_helpers = target.num_connections - 1
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "sam-redis")

    @property
    @override
    def has_scripts_over_many_keys(self) -> bool:
        return True

    @override
    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        def work(link: Link, replies: list[Reply]) -> None:
            for start in range(len(replies), len(commands), _MAX_COMMANDS):
                batch = commands[start : start + _MAX_COMMANDS]
                link.send([b"".join(map(encode, batch))])
                replies.extend(link.receive() for _ in batch)

        return self._with_links(len(commands), work, deadline)

    @override
    def write(
        self, entries: Sequence[Entry], ttl_ms: int, deadline: float
    ) -> list[Reply]:
        replies = self._write(entries, ttl_ms, deadline, _NEW)
        known = [index for index, reply in enumerate(replies) if reply is None]
        again = self._write([entries[i] for i in known], ttl_ms, deadline, _OLD)
        for index, reply in zip(known, again, strict=True):
            replies[index] = reply
        return replies

    def _write(
        self, entries: Sequence[Entry], ttl_ms: int, deadline: float, put: _Put
    ) -> list[Reply]:
        def transfer(share: Sequence[Entry]) -> list[Reply]:
            def work(link: Link, replies: list[Reply]) -> None:
                sizes = [entry.num_bytes for entry in share]
                num_ahead = 0
                for position in range(len(replies), len(share)):
                    while num_ahead and (
                        num_ahead + sizes[position] > _WRITE_AHEAD_BYTES
                        or position - len(replies) >= _MAX_COMMANDS
                    ):
                        num_ahead -= sizes[len(replies)]
                        replies.append(put.receive(link))
                    link.send(put.commands(share[position], ttl_ms))
                    num_ahead += sizes[position]
                while len(replies) < len(share):
                    replies.append(put.receive(link))

            return self._with_links(len(share), work, deadline)

        return self._spread(entries, transfer)

    @override
    def read(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        def transfer(share: Sequence[Entry]) -> list[Reply]:
            def work(link: Link, replies: list[Reply]) -> None:
                _read(link, share, replies)

            return self._with_links(len(share), work, deadline)

        return self._spread(entries, transfer)

    @override
    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
        self._helpers.shutdown(wait=False)

    # --- one batch over several connections ---------------------------------------

    def _spread(self, entries: Sequence[Entry], transfer: _Transfer) -> list[Reply]:
        """Every n-th value goes over the n-th connection, as many as are free."""
        num_bytes = sum(entry.num_bytes for entry in entries)
        num_helpers = self._borrow_helpers(
            min(num_bytes // _MIN_SHARE_BYTES, len(entries)) - 1
        )
        if not num_helpers:
            return transfer(entries)
        try:
            num_shares = num_helpers + 1
            shares = [entries[n::num_shares] for n in range(num_shares)]
            futures = [self._helpers.submit(transfer, share) for share in shares[1:]]
            replies: list[Reply] = [None] * len(entries)
            replies[::num_shares] = transfer(shares[0])
            for n, future in enumerate(futures, start=1):
                replies[n::num_shares] = future.result()
            return replies
        finally:
            with self._lock:
                self._num_helpers += num_helpers

    def _borrow_helpers(self, wanted: int) -> int:
        with self._lock:
            if self._is_closed:
                return 0
            num_helpers = max(0, min(wanted, self._num_helpers))
            self._num_helpers -= num_helpers
            return num_helpers

    # --- connections --------------------------------------------------------------

    def _with_links(
        self, num_replies: int, work: _Work, deadline: float
    ) -> list[Reply]:
        """Does ``work``; what is not answered in the end has failed.

        What answers too much is left, and the work goes on with the next connection.

        A connection that was idle may have been closed by the server meanwhile. If one
        breaks, the work goes on with another, unless it was new and of no use at all:
        then the server is down.
        """
        replies: list[Reply] = []
        error: StoreError | None = None
        num_lost = 0
        while len(replies) < num_replies and num_lost < _MAX_CONNECTIONS_LOST:
            num_before = len(replies)
            link, error = self._take(deadline, must_be_new=num_lost > 0)
            if link is None:
                break
            is_new = link.is_new
            error = self._do(link, work, replies, deadline)
            if error is None:
                continue
            num_lost += 1
            if not isinstance(error, StoreUnavailable):
                break
            if is_new and len(replies) == num_before:
                break
        failure = error or cut(LinkError("too often"))
        return replies + [failure] * (num_replies - len(replies))

    def _do(
        self, link: Link, work: _Work, replies: list[Reply], deadline: float
    ) -> StoreError | None:
        is_sound = False
        try:
            link.deadline = deadline
            work(link, replies)
            is_sound = True
            return None
        except TimeoutError:
            return timed_out()
        except ValueTooLong:
            # The connection ends for it, but the server has answered.
            replies.append(None)
            return None
        except LinkError as error:
            return cut(error)
        finally:
            # One whose replies are not all read would answer the next call with them.
            self._give_back(link, is_sound=is_sound)

    def _take(
        self, deadline: float, *, must_be_new: bool
    ) -> tuple[Link | None, StoreError | None]:
        if time.monotonic() >= deadline:
            return None, timed_out()
        with self._lock:
            if self._is_closed:
                return None, CLOSED
            if self._idle and not must_be_new:
                return self._idle.pop(), None
        return self._connect(deadline)

    def _connect(self, deadline: float) -> tuple[Link | None, StoreError | None]:
        connection: Any = self._target.make_connection()
        try:
            with until(deadline):
                connection.connect()
            return Link(connection), None
        except Exception as error:
            # What redis-py raises depends on where in its machinery a server broke.
            connection.disconnect()
            return None, self._target.scrubbed(error_of_exception(error))

    def _give_back(self, link: Link, *, is_sound: bool) -> None:
        link.is_new = False
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(link)
                return
        link.close()


def _read(link: Link, entries: Sequence[Entry], replies: list[Reply]) -> None:
    """Asks for as many values ahead as is good, and receives one after another."""
    sizes = [entry.num_bytes for entry in entries]
    num_asked, num_bytes = len(replies), 0
    for position in range(len(replies), len(entries)):
        asked = []
        while num_asked < len(entries) and (
            num_asked == position
            or (
                num_bytes + sizes[num_asked] <= _AHEAD_BYTES
                and num_asked - position < _MAX_AHEAD
            )
        ):
            asked.append(encode(("GET", str(entries[num_asked].key))))
            num_bytes += sizes[num_asked]
            num_asked += 1
        if asked:
            link.send([b"".join(asked)])
        replies.append(link.receive_into(entries[position].buffers, sizes[position]))
        num_bytes -= sizes[position]


def _put_new(entry: Entry, ttl_ms: int) -> list[bytes | memoryview]:
    """Writes a value that is not there; nothing else: another command costs time."""
    key, ttl = str(entry.key).encode(), b"%d" % ttl_ms
    head = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, entry.num_bytes)
    tail = b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
    return [head, *entry.buffers, tail]


def _new_reply(link: Link) -> Reply:
    """1 if the value is written; ``None`` if there was one."""
    reply = link.receive()
    return reply if reply is None or isinstance(reply, StoreError) else 1


def _put_old(entry: Entry, ttl_ms: int) -> list[bytes | memoryview]:
    """Overwrites a value, and lets it live as long as the longer of the two lives.

    In one transaction, so that a value never has no end; but that costs a server up to
    half of its speed. ``NX`` gives an end to what had none, ``GT`` a later one.
    """
    key, ttl = str(entry.key).encode(), b"%d" % ttl_ms
    head = encode(("MULTI",)) + b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        len(key),
        key,
        entry.num_bytes,
    )
    tail = b"\r\n$7\r\nKEEPTTL\r\n" + b"".join(
        encode(command)
        for command in (
            ("PEXPIRE", key, ttl, "NX"),
            ("PEXPIRE", key, ttl, "GT"),
            ("EXEC",),
        )
    )
    return [head, *entry.buffers, tail]


def _old_reply(link: Link) -> Reply:
    """1 if the value is written; the replies to the transaction in one."""
    queued = [link.receive() for _ in range(4)]
    executed = link.receive_all()
    for reply in (*queued, *executed):
        if isinstance(reply, StoreError):
            return reply
    return 1


class _Put(NamedTuple):
    """A way to write a value: what is sent, and what its replies mean."""

    commands: Callable[[Entry, int], list[bytes | memoryview]]
    receive: Callable[[Link], Reply]


_NEW = _Put(_put_new, _new_reply)
_OLD = _Put(_put_old, _old_reply)
