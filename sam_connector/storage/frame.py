"""The form of a value: a header of fixed size, then the blocks' bytes.

The header says what the bytes are and how they must add up, so that a value that is
short, old, another model's or damaged is recognised as none. It is separate from the
bytes, which go from host memory to the store and back without being copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import xxhash

HEADER_BYTES = 128

_MAGIC = b"SAM1"
_LENGTH_BYTES = 2
_START = len(_MAGIC) + _LENGTH_BYTES
_FORMAT = 1


def encode_header(fingerprint: str, buffers: Sequence[memoryview]) -> bytes:
    """The header of a value that consists of ``buffers``.

    Args:
        fingerprint: as in the value's name; at most 64 characters.
        buffers: contiguous bytes. Read once, for the checksum; xxhash lets other
            threads run meanwhile.
    """
    fields = {
        "f": _FORMAT,
        "p": fingerprint,
        "n": sum(map(len, buffers)),
        "x": _checksum(buffers),
    }
    packed: bytes = msgpack.packb(fields)
    header = _MAGIC + len(packed).to_bytes(_LENGTH_BYTES, "big") + packed
    if len(header) > HEADER_BYTES:
        raise ValueError(f"the fingerprint is too long: {fingerprint!r}")
    return header.ljust(HEADER_BYTES, b"\0")


def verify(
    header: memoryview | bytes, fingerprint: str, buffers: Sequence[memoryview]
) -> str | None:
    """Why a value is not what it should be; ``None`` if it is. Never raises.

    Args:
        header: as it was read.
        fingerprint: that the value must have.
        buffers: the bytes behind the header.
    """
    fields = _decode(bytes(header))
    if fields is None:
        return "it has no header of ours"
    if fields.get("f") != _FORMAT:
        return f"its format is {fields.get('f')!r}, not {_FORMAT}"
    if fields.get("p") != fingerprint:
        return "it is another model's"
    num_bytes = sum(map(len, buffers))
    if fields.get("n") != num_bytes:
        return f"it should have {fields.get('n')!r} bytes, not {num_bytes}"
    if fields.get("x") != _checksum(buffers):
        return "its checksum is wrong"
    return None


def _decode(header: bytes) -> dict[Any, Any] | None:
    if len(header) != HEADER_BYTES or not header.startswith(_MAGIC):
        return None
    length = int.from_bytes(header[len(_MAGIC) : _START], "big")
    try:
        fields = msgpack.unpackb(
            header[_START : _START + length], strict_map_key=False, max_ext_len=0
        )
    except Exception:
        # Whatever msgpack makes of foreign bytes.
        return None
    return fields if isinstance(fields, dict) else None


def _checksum(buffers: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
