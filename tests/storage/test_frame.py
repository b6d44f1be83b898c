"""Headers: what is wrong is told, whatever it is, and nothing raises."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam_connector.storage import frame

F = "ab" * 16
BUFFERS = [memoryview(b"abc"), memoryview(b"defgh")]

#: Magic, length, and the fields f, p, n and x as msgpack.
GOLDEN_HEADER = (
    "53414d31003684a16601a170d920616261626162616261626162616261626162"
    "6162616261626162616261626162a16e08a178cf6f45a76842a96483"
)


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


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=4,
) | st.binary(max_size=40)


@pytest.mark.parametrize("fields", [None, 7, "x", [], [["f", 1]], b"f"])
def test_fields_may_be_no_fields(fields: object) -> None:
    packed = msgpack.packb(fields)
    made = (b"SAM1" + len(packed).to_bytes(2, "big") + packed).ljust(128, b"\0")
    assert frame.verify(made, F, BUFFERS) == "it has no header of ours"


@given(st.dictionaries(st.sampled_from("fpnxz") | st.integers(0, 9), values))
def test_any_fields_may_come(fields: dict[object, object]) -> None:
    packed = msgpack.packb(fields)
    made = (b"SAM1" + len(packed).to_bytes(2, "big") + packed).ljust(128, b"\0")[:128]
    assert frame.verify(made, F, BUFFERS) is not None


@given(st.integers(0, 127), st.integers(1, 255))
def test_a_damaged_header_never_raises(position: int, change: int) -> None:
    made = bytearray(frame.encode_header(F, BUFFERS))
    length = 6 + int.from_bytes(made[4:6], "big")
    made[position] ^= change
    flaw = frame.verify(bytes(made), F, BUFFERS)
    # Behind the fields there is padding, which means nothing.
    assert (flaw is None) == (position >= length)


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_other_content_is_noticed_whatever_its_length(one: bytes, two: bytes) -> None:
    made = frame.encode_header(F, [memoryview(one)])
    assert (frame.verify(made, F, [memoryview(two)]) is None) == (one == two)


def test_the_form_is_fixed() -> None:
    """Several versions read one store: what was written stays readable."""
    assert frame.encode_header(F, BUFFERS).rstrip(b"\0").hex() == (GOLDEN_HEADER)


def test_buffers_in_another_order_are_other_bytes() -> None:
    made = frame.encode_header(F, BUFFERS)
    assert frame.verify(made, F, BUFFERS[::-1]) is not None


def test_a_fingerprint_that_does_not_fit_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="too long"):
        frame.encode_header("a" * 200, BUFFERS)
