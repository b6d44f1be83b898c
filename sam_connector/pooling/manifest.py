"""Session manifests: what other engines are told of a session, and its coding.

A manifest is data from outside: whoever writes to the store may have written it. It is
sized, checksummed and checked in every part before anything is made of it, and it is
never believed about what a block holds, only about which hashes to look for.

Layout: magic, one byte of format version, xxh3-64 of the rest (big-endian), msgpack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
import xxhash

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.errors import SamError

_MAGIC = b"SAMM"
_FORMAT = 1
_HEADER_BYTES = len(_MAGIC) + 1 + 8

_MIN_HASH_BYTES = 8
_MAX_HASH_BYTES = 512
_MAX_ID_CHARS = 4_096
_MAX_GROUPS = 1_024

#: Scripts in stores calculate with doubles, which count no further.
MAX_VERSION = (1 << 53) - 1

_T = TypeVar("_T")


class ManifestError(SamError, ValueError):
    """What is stored under a manifest's name is none that we can use."""


@dataclass(frozen=True, slots=True)
class ManifestContext:
    """One context: the hashes of its blocks in every group, in order.

    Attributes:
        hashes: by group; all of a group are of the same length.
        num_tokens: that its blocks hold; 0 if it was not said.
    """

    hashes: Mapping[GroupId, tuple[BlockHash, ...]]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of a session.

    Attributes:
        session: whose.
        contexts: it has at least one.
        block_sizes: tokens in a block of each group; empty if it was not said.
        parent: of the same tenant.
        lease_s: seconds that its lease had left when it was written.
        version: a later turn has a greater one.
        written_at: wall clock, seconds; for people and for the age of the lease.
    """

    session: SessionKey
    contexts: tuple[ManifestContext, ...]
    block_sizes: Mapping[GroupId, int] = field(default_factory=dict)
    parent: SessionKey | None = None
    lease_s: float = 0.0
    version: int = 0
    written_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLimits:
    """Bounds of what is read.

    Attributes:
        max_bytes: of all of it.
        max_contexts: most contexts.
        max_blocks: of all contexts and groups together.
        group_ids: the groups that there are; ``None`` for any.
    """

    max_bytes: int = 8 << 20
    max_contexts: int = 1_024
    max_blocks: int = 1 << 20
    group_ids: frozenset[GroupId] | None = None


def next_version(last_seen: int, wall_clock_ms: float) -> int:
    """The version of something that happens now, after ``last_seen``.

    A hybrid logical clock: as good as the wall clock between engines that have not
    heard of each other, and never behind what has been seen.
    """
    return min(MAX_VERSION, max(last_seen + 1, int(wall_clock_ms)))


def encode(manifest: Manifest) -> bytes:
    """The stored form.

    Raises:
        ManifestError: it has hashes of several lengths in one group.
    """
    payload = msgpack.packb(
        [
            list(manifest.session),
            None if manifest.parent is None else list(manifest.parent),
            manifest.version,
            float(manifest.lease_s),
            float(manifest.written_at),
            [[int(g), size] for g, size in sorted(manifest.block_sizes.items())],
            [_encode_context(context) for context in manifest.contexts],
        ]
    )
    return _MAGIC + bytes([_FORMAT]) + xxhash.xxh3_64_digest(payload) + payload


def decode(
    data: bytes,
    *,
    expected_session: SessionKey,
    limits: ManifestLimits = ManifestLimits(),
) -> Manifest:
    """Reads a stored form.

    Raises:
        ManifestError: it is not a manifest of ``expected_session`` within ``limits``.
    """
    _require(len(data) <= limits.max_bytes, "it is too large")
    _require(len(data) > _HEADER_BYTES, "it is too short")
    _require(data[:4] == _MAGIC, "it is no manifest")
    _require(data[4] == _FORMAT, f"its format is {data[4]}, not {_FORMAT}")
    payload = data[_HEADER_BYTES:]
    checksum = data[5:_HEADER_BYTES]
    _require(xxhash.xxh3_64_digest(payload) == checksum, "its checksum is wrong")
    return _Reader(expected_session, limits).read(_unpack(payload, limits))


def _encode_context(context: ManifestContext) -> list[Any]:
    groups = []
    for group_id, hashes in sorted(context.hashes.items()):
        length = len(hashes[0]) if hashes else 0
        if any(len(block_hash) != length for block_hash in hashes):
            raise ManifestError(f"hashes of group {group_id} differ in length")
        groups.append([int(group_id), length, b"".join(hashes)])
    return [context.num_tokens, groups]


def _unpack(payload: bytes, limits: ManifestLimits) -> Any:
    try:
        return msgpack.unpackb(
            payload,
            strict_map_key=True,
            max_str_len=4 * _MAX_ID_CHARS,
            max_bin_len=limits.max_bytes,
            max_array_len=max(limits.max_contexts, _MAX_GROUPS),
            max_map_len=0,
            max_ext_len=0,
        )
    # Several unrelated types, of msgpack's own and of Python's, up to RecursionError.
    except Exception as error:
        raise ManifestError(f"it cannot be read: {type(error).__name__}") from None


class _Reader:
    """Makes a manifest of what was unpacked, and believes nothing."""

    def __init__(self, session: SessionKey, limits: ManifestLimits) -> None:
        self._session = session
        self._limits = limits
        self._num_blocks = 0

    def read(self, raw: Any) -> Manifest:
        session, parent, version, lease_s, written_at, sizes, contexts = _list(raw, 7)
        _require(self._key(session) == self._session, "it is of another session")
        _require(_is_int(version, 0, MAX_VERSION), "its version is no version")
        _require(_is_seconds(lease_s), "its lease is no time")
        _require(_is_seconds(written_at), "its date is no time")
        _require(isinstance(contexts, list), "its contexts are no list")
        _require(
            0 < len(contexts) <= self._limits.max_contexts,
            f"it has {len(contexts)} contexts",
        )
        return Manifest(
            session=self._session,
            parent=None if parent is None else self._parent(parent),
            version=version,
            lease_s=lease_s,
            written_at=written_at,
            block_sizes=self._by_group(sizes, self._block_size),
            contexts=tuple(map(self._context, contexts)),
        )

    def _key(self, raw: Any) -> SessionKey:
        tenant, session_id = _list(raw, 2)
        for text in (tenant, session_id):
            _require(
                isinstance(text, str) and len(text) <= _MAX_ID_CHARS, "a name is none"
            )
        return SessionKey(tenant, session_id)

    def _parent(self, raw: Any) -> SessionKey:
        parent = self._key(raw)
        _require(
            parent.tenant == self._session.tenant, "its parent is another tenant's"
        )
        return parent

    def _context(self, raw: Any) -> ManifestContext:
        num_tokens, groups = _list(raw, 2)
        _require(_is_int(num_tokens, 0, 1 << 48), "a number of tokens is none")
        return ManifestContext(self._by_group(groups, self._hashes), num_tokens)

    def _by_group(self, raw: Any, read: Callable[[list[Any]], _T]) -> dict[GroupId, _T]:
        _require(isinstance(raw, list) and len(raw) <= _MAX_GROUPS, "no groups")
        values: dict[GroupId, _T] = {}
        for item in raw:
            _require(isinstance(item, list) and len(item) >= 2, "a group is none")
            group_id, *rest = item
            _require(_is_int(group_id, 0, 1 << 31), "a group's number is none")
            known = self._limits.group_ids
            _require(known is None or group_id in known, "a group is not known")
            _require(group_id not in values, "a group occurs twice")
            values[GroupId(group_id)] = read(rest)
        return values

    def _block_size(self, raw: list[Any]) -> int:
        (size,) = _list(raw, 1)
        _require(_is_int(size, 1, 1 << 31), "a block size is none")
        return int(size)

    def _hashes(self, raw: list[Any]) -> tuple[BlockHash, ...]:
        length, data = _list(raw, 2)
        _require(isinstance(data, bytes), "hashes are no bytes")
        if not data:
            return ()
        _require(
            _is_int(length, _MIN_HASH_BYTES, _MAX_HASH_BYTES)
            and len(data) % length == 0,
            "hashes have no proper length",
        )
        self._num_blocks += len(data) // length
        _require(self._num_blocks <= self._limits.max_blocks, "it has too many blocks")
        return tuple(
            BlockHash(data[start : start + length])
            for start in range(0, len(data), length)
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(message)


def _list(raw: Any, length: int) -> list[Any]:
    _require(isinstance(raw, list) and len(raw) == length, "its structure is another")
    return raw  # type: ignore[no-any-return]


def _is_int(raw: Any, low: int, high: int) -> bool:
    return type(raw) is int and low <= raw <= high


def _is_seconds(raw: Any) -> bool:
    return type(raw) is float and math.isfinite(raw) and raw >= 0
