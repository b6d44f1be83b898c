"""Whatever redis-py does on a socket ends by the thread's deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sam_backends.redis_store.sockets import DeadlineSocket, seconds_left, until


@pytest.fixture
def ends() -> Iterator[tuple[DeadlineSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield DeadlineSocket(ours), theirs


def test_a_read_waits_for_what_is_left(
    ends: tuple[DeadlineSocket, socket.socket],
) -> None:
    start = time.monotonic()
    with until(start + 0.1), pytest.raises(TimeoutError):
        ends[0].recv(1)
    assert time.monotonic() - start < 3
    with until(start), pytest.raises(TimeoutError):
        ends[0].recv_into(bytearray(1))


def test_bytes_that_drip_do_not_put_it_off(
    ends: tuple[DeadlineSocket, socket.socket],
) -> None:
    ours, theirs = ends
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.02):
            theirs.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with until(start + 0.2), pytest.raises(TimeoutError):
        _read_for_ever(ours)
    assert time.monotonic() - start < 3
    is_over.set()
    thread.join()


def test_a_write_that_nobody_reads_ends(
    ends: tuple[DeadlineSocket, socket.socket],
) -> None:
    start = time.monotonic()
    with until(start + 0.1), pytest.raises(TimeoutError):
        ends[0].sendall(bytes(64 << 20))
    assert time.monotonic() - start < 3


def test_polling_stays_polling(ends: tuple[DeadlineSocket, socket.socket]) -> None:
    """redis-py does so to see whether a connection is stale."""
    ends[0].settimeout(0)
    with until(time.monotonic() + 10), pytest.raises(BlockingIOError):
        ends[0].recv(1)


def test_a_shorter_timeout_holds_as_well(
    ends: tuple[DeadlineSocket, socket.socket],
) -> None:
    ends[0].settimeout(0.05)
    with until(time.monotonic() + 60), pytest.raises(TimeoutError):
        ends[0].recv(1)


def test_deadlines_are_of_a_thread_and_nest() -> None:
    seen: list[float] = []
    with until(time.monotonic() + 100):
        with until(time.monotonic() + 10):
            assert seconds_left() <= 10
            thread = threading.Thread(target=lambda: seen.append(seconds_left()))
            thread.start()
            thread.join()
        assert 10 < seconds_left() <= 100
    assert seen == [0.5]
    assert seconds_left() == 0.5


def _read_for_ever(sock: DeadlineSocket) -> None:
    while True:
        sock.recv(1)
