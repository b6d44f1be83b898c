"""RESP over a socket pair: every way in which bytes may arrive."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sam_backends.redis_store.link import Link, LinkError, ValueTooLong, encode
from sam_connector.errors import StoreFull


class _Pair:
    """A link and the server's end of its connection."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        connection = SimpleNamespace(
            _sock=SimpleNamespace(raw=ours), disconnect=ours.close
        )
        self.link = Link(connection)
        self.link.deadline = time.monotonic() + 10


@pytest.fixture
def pair() -> Iterator[_Pair]:
    pair = _Pair()
    yield pair
    pair.link.close()
    pair.server.close()


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":12\r\n", 12),
        (b"$3\r\na\r\n\r\n", b"a\r\n"),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
    ],
)
def test_small_replies_byte_by_byte(pair: _Pair, data: bytes, reply: object) -> None:
    def drip() -> None:
        for byte in data:
            pair.server.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    assert pair.link.receive() == reply
    thread.join()


def test_errors_are_values(pair: _Pair) -> None:
    pair.server.sendall(b"-OOM no room\r\n:1\r\n-WRONGTYPE x\r\n")
    assert isinstance(pair.link.receive(), StoreFull)
    assert pair.link.receive() == 1
    assert pair.link.receive() is None


@pytest.mark.parametrize("chunk", [1, 3, 11, 12, 40, 1_000])
def test_values_land_in_their_buffers_however_they_arrive(
    pair: _Pair, chunk: int
) -> None:
    """Three values in a row, in odd buffers, with a miss and an error between."""
    value = bytes(range(256)) * 4
    one = b"$1024\r\n%b\r\n" % value
    data = one + b"$-1\r\n" + one + b"-ERR x\r\n" + one

    def send() -> None:
        for start in range(0, len(data), chunk):
            pair.server.sendall(data[start : start + chunk])

    thread = threading.Thread(target=send)
    thread.start()
    replies = []
    for _ in range(5):
        memory = bytearray(1_024)
        view = memoryview(memory)
        buffers = [view[:1], view[1:1], view[1:700], view[700:]]
        replies.append(pair.link.receive_into(buffers, 1_024))
        if replies[-1] == 1:
            assert memory == value
    assert [replies[n] for n in (0, 1, 2, 4)] == [1, None, 1, 1]
    thread.join()


def test_more_buffers_than_one_call_takes(pair: _Pair) -> None:
    memory = bytearray(5_000)
    buffers = [memoryview(memory)[n : n + 1] for n in range(5_000)]
    content = bytes(n % 251 for n in range(5_000))
    pair.server.sendall(b"$5000\r\n" + content + b"\r\n")
    assert pair.link.receive_into(buffers, 5_000) == 1
    assert memory == content
    thread = threading.Thread(target=pair.link.send, args=(buffers,))
    thread.start()
    received = b""
    while len(received) < 5_000:
        received += pair.server.recv(100)
    thread.join()
    assert received == content


def test_another_length_is_read_and_thrown_away(pair: _Pair) -> None:
    memory = bytearray(b"\xa5" * 10)
    pair.server.sendall(b"$20\r\n" + b"x" * 20 + b"\r\n$4\r\nabcd\r\n$2\r\nok\r\n")
    assert pair.link.receive_into([memoryview(memory)], 10) is None
    assert pair.link.receive_into([memoryview(memory)], 10) is None
    assert memory == b"\xa5" * 10
    assert pair.link.receive() == b"ok"


def test_much_of_another_length_is_not_worth_it(pair: _Pair) -> None:
    pair.server.sendall(b"$99999999\r\n")
    with pytest.raises(ValueTooLong):
        pair.link.receive_into([memoryview(bytearray(10))], 10)
    pair.server.sendall(b"$99999999\r\n")
    with pytest.raises(ValueTooLong):
        pair.link.receive()


@pytest.mark.parametrize(
    "data",
    [
        b"$5\r\nabcdefgh",
        b"$x\r\n",
        b"?\r\n",
        b"*1\r\n",
        b":x\r\n",
        b"\r\n",
        b"$99999999999\r\n",
        b"x" * 100_000,
    ],
)
def test_nonsense_ends_the_connection(pair: _Pair, data: bytes) -> None:
    thread = threading.Thread(target=_send_and_shut, args=(pair.server, data))
    thread.start()
    with pytest.raises(LinkError):
        _receive_two(pair.link)
    thread.join()


def test_a_value_must_end_where_it_should(pair: _Pair) -> None:
    pair.server.sendall(b"$5\r\nabcdefgh")
    with pytest.raises(LinkError, match="end"):
        pair.link.receive_into([memoryview(bytearray(5))], 5)


def test_arrays_are_small(pair: _Pair) -> None:
    pair.server.sendall(b"*2\r\n+OK\r\n:1\r\n-OOM x\r\n*99999\r\n")
    assert pair.link.receive_all() == [b"OK", 1]
    assert isinstance(pair.link.receive_all()[0], StoreFull)
    with pytest.raises(LinkError):
        pair.link.receive_all()


def test_a_peer_that_does_not_read_ends_by_the_deadline(pair: _Pair) -> None:
    pair.link.deadline = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        pair.link.send([memoryview(bytearray(64 << 20))])


def test_a_peer_that_reads_a_little_now_and_then_does_not_put_it_off(
    pair: _Pair,
) -> None:
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(0.1):
            pair.server.recv(200_000)

    reader = threading.Thread(target=read)
    reader.start()
    began = time.monotonic()
    pair.link.deadline = began + 0.3
    try:
        with pytest.raises(TimeoutError):
            pair.link.send([memoryview(bytearray(16 << 20))])
        assert time.monotonic() - began < 3
    finally:
        is_over.set()
        reader.join()


def test_what_a_peer_reads_in_time_is_sent_whole(pair: _Pair) -> None:
    data = bytes(range(256)) * (8 << 12)
    received = bytearray()

    def read() -> None:
        while len(received) < len(data):
            received.extend(pair.server.recv(100_000))

    reader = threading.Thread(target=read)
    reader.start()
    pair.link.send([data[:11], data[11:]])
    reader.join()
    assert received == data


def test_a_peer_that_stops_in_a_value_ends_by_the_deadline(pair: _Pair) -> None:
    pair.server.sendall(b"$1000\r\nabc")
    pair.link.deadline = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        pair.link.receive_into([memoryview(bytearray(1_000))], 1_000)


def test_commands_on_the_wire() -> None:
    assert encode(("SET", b"k\r\n", 12, "ä")) == (
        b"*4\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n12\r\n$2\r\n\xc3\xa4\r\n"
    )


def _send_and_shut(server: socket.socket, data: bytes) -> None:
    server.sendall(data)
    server.shutdown(socket.SHUT_WR)


def _receive_two(link: Link) -> None:
    for _ in range(2):
        link.receive()
