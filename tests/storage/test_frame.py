"""Headers: what is wrong is told, whatever it is, and nothing raises."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam_connector.storage import frame

F = "ab" * 16
BUFFERS = [memoryview(b"abc"), memoryview(b"defgh")]


def header(**changes: object) -> bytes:
    """A good header with some of its fields changed."""
    good = frame.encode_header(F, BUFFERS)
    length = int.from_bytes(good[4:6], "big")
    fields = msgpack.unpackb(good[6 : 6 + length]) | changes
    packed = msgpack.packb(fields)
    return (b"SAM1" + len(packed).to_bytes(2, "big") + packed).ljust(128, b"\0")


def test_what_was_framed_is_good() -> None:
    made = frame.encode_header(F, BUFFERS)
    assert len(made) == frame.HEADER_BYTES
    assert frame.verify(made, F, BUFFERS) is None
    assert frame.verify(memoryview(made), F, [memoryview(b"abcdefgh")]) is None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (header(f=2), "format"),
        (header(p="cd" * 16), "another model"),
        (header(n=7), "bytes"),
        (header(x=1), "checksum"),
        (b"", "no header"),
        (b"\0" * 128, "no header"),
        (b"SAM1\xff\xff" + b"\xc1" * 122, "no header"),
        (header()[:-1], "no header"),
    ],
)
def test_a_header_that_is_wrong_says_how(made: bytes, reason: str) -> None:
    flaw = frame.verify(made, F, BUFFERS)
    assert flaw is not None
    assert reason in flaw


@given(st.integers(0, 7), st.integers(1, 255))
def test_any_byte_that_is_damaged_is_noticed(position: int, change: int) -> None:
    content = bytearray(b"abcdefgh")
    content[position] ^= change
    made = frame.encode_header(F, BUFFERS)
    assert frame.verify(made, F, [memoryview(content)]) is not None


@given(st.binary(max_size=200))
def test_any_bytes_may_come(garbage: bytes) -> None:
    assert frame.verify(garbage, F, BUFFERS) is not None
    framed = (b"SAM1" + garbage).ljust(128, b"\0")[:128]
    assert frame.verify(framed, F, BUFFERS) is not None


def test_buffers_in_another_order_are_other_bytes() -> None:
    made = frame.encode_header(F, BUFFERS)
    assert frame.verify(made, F, BUFFERS[::-1]) is not None


def test_a_fingerprint_that_does_not_fit_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="too long"):
        frame.encode_header("a" * 200, BUFFERS)
