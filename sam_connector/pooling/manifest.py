"""Session manifests: what another engine needs to know to bring a session back.

A manifest is data from outside. Its size, checksum and every field are checked, it
must be the session's that was asked for, and what it says a block holds is never
believed: blocks are read by their own hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.errors import SamError
from sam_connector.storage.port import MAX_VERSION

_FORMAT = 1
_CHECKSUM_BYTES = 8

#: vLLM's hashes are of 32 bytes, and joined for groups with larger blocks.
_HASH_BYTES = range(8, 513)

_MAX_GROUPS = 64
_MAX_ID_LENGTH = 4_096


class ManifestError(SamError, ValueError):
    """The bytes are not a manifest of the session that was asked for."""


@dataclass(frozen=True, slots=True)
class ManifestContext:
    """One context: the hashes of its blocks, by KV cache group."""

    hashes: Mapping[GroupId, Sequence[BlockHash]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is stored of a session.

    Attributes:
        session: whose it is.
        contexts: the one used last at the end.
        block_sizes: tokens per block, by group.
        parent: the session that spawned it.
        lease_until: end of its lease, in Unix seconds; 0 for none.
        version: grows with every turn.
    """

    session: SessionKey
    contexts: Sequence[ManifestContext]
    block_sizes: Mapping[GroupId, int]
    parent: SessionKey | None = None
    lease_until: float = 0.0
    version: int = 0

    @property
    def num_tokens(self) -> int:
        """Of its largest context."""
        return max(
            (
                len(hashes) * self.block_sizes.get(group_id, 0)
                for context in self.contexts
                for group_id, hashes in context.hashes.items()
            ),
            default=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLimits:
    """What a manifest may contain: no more than a backend reads in one reply."""

    max_bytes: int = 4 << 20
    max_contexts: int = 64
    max_blocks: int = 1 << 17


class VersionClock:
    """Versions of sessions' manifests, each later than all that were seen before.

    A hybrid logical clock: wall clocks decide between instances that have not heard
    of each other, and a clock that lags behind never makes a newer turn the older.

    Args:
        max_sessions: remembered; the oldest are forgotten.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._versions: dict[SessionKey, int] = {}

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._versions

    def next(self, session: SessionKey, now_s: float) -> int:
        """A version for what happens at ``now_s``, Unix seconds."""
        version = max(self._versions.get(session, 0) + 1, int(now_s * 1000))
        version = min(version, MAX_VERSION)
        self.saw(session, version)
        return version

    def saw(self, session: SessionKey, version: int) -> None:
        """The store has, or is about to have, this version."""
        known = self._versions.pop(session, 0)
        self._versions[session] = max(known, version)
        while len(self._versions) > self._max_sessions:
            del self._versions[next(iter(self._versions))]

    def clear(self) -> None:
        self._versions.clear()


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes, with its checksum in front.

    Raises:
        ManifestError: hashes of one group differ in length.
    """
    fields = {
        "format": _FORMAT,
        "tenant": manifest.session.tenant,
        "session": manifest.session.session_id,
        "version": manifest.version,
        "lease_until": float(manifest.lease_until),
        "parent": None if manifest.parent is None else list(manifest.parent),
        "block_sizes": {int(g): size for g, size in manifest.block_sizes.items()},
        # Joined: a list of so many small strings is slow to read and write.
        "contexts": [
            {
                int(group_id): [_size_of(hashes), b"".join(hashes)]
                for group_id, hashes in context.hashes.items()
            }
            for context in manifest.contexts
        ],
    }
    body: bytes = msgpack.packb(fields)
    return xxhash.xxh3_64_digest(body) + body


def decode(data: bytes, expected: SessionKey, limits: ManifestLimits) -> Manifest:
    """The inverse of ``encode``, for bytes that anybody may have written.

    Raises:
        ManifestError: they are no manifest of the session ``expected``.
    """
    if len(data) > limits.max_bytes:
        raise ManifestError(f"{len(data)} bytes are too many")
    body = memoryview(data)[_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_digest(body) != data[:_CHECKSUM_BYTES]:
        raise ManifestError("the checksum is wrong")
    try:
        fields = msgpack.unpackb(
            body,
            strict_map_key=False,
            max_map_len=_MAX_GROUPS,
            max_array_len=max(_MAX_GROUPS, limits.max_contexts),
            max_bin_len=limits.max_bytes,
            max_str_len=_MAX_ID_LENGTH * 4,
            max_ext_len=0,
        )
        return _checked(fields, expected, limits)
    except ManifestError:
        raise
    except Exception as error:
        # Whatever msgpack, or a field of another type, makes of foreign bytes.
        raise ManifestError(f"not a manifest: {error!r}") from error


def _checked(fields: Any, expected: SessionKey, limits: ManifestLimits) -> Manifest:
    if fields["format"] != _FORMAT:
        raise ManifestError(f"format {fields['format']!r} is not known")
    session = _session([fields["tenant"], fields["session"]])
    if session != expected:
        raise ManifestError("it is another session's")
    version, lease_until = fields["version"], fields["lease_until"]
    if type(version) is not int or not 0 <= version <= MAX_VERSION:
        raise ManifestError(f"version {version!r}")
    if type(lease_until) is not float or not 0 <= lease_until < float("inf"):
        raise ManifestError(f"lease until {lease_until!r}")
    block_sizes = {}
    for group_id, size in fields["block_sizes"].items():
        if type(group_id) is not int or type(size) is not int or size < 1:
            raise ManifestError(f"blocks of {size!r} tokens")
        block_sizes[GroupId(group_id)] = size
    contexts = fields["contexts"]
    if type(contexts) is not list or len(contexts) > limits.max_contexts:
        raise ManifestError("too many contexts")
    # Counted before anything is made of them.
    num_blocks = sum(len(j) // size for c in contexts for size, j in c.values())
    if num_blocks > limits.max_blocks:
        raise ManifestError(f"{num_blocks} blocks are too many")
    checked = [ManifestContext(_hashes(context)) for context in contexts]
    parent = None if fields["parent"] is None else _session(fields["parent"])
    if parent is not None and parent.tenant != session.tenant:
        raise ManifestError("its parent is another tenant's")
    return Manifest(
        session=session,
        contexts=checked,
        block_sizes=block_sizes,
        parent=parent,
        lease_until=lease_until,
        version=version,
    )


def _session(pair: Any) -> SessionKey:
    tenant, session_id = pair
    for text in (tenant, session_id):
        if type(text) is not str or len(text) > _MAX_ID_LENGTH:
            raise ManifestError("a name is not text, or too long")
    return SessionKey(tenant, session_id)


def _size_of(hashes: Sequence[BlockHash]) -> int:
    sizes = set(map(len, hashes)) or {_HASH_BYTES.start}
    if len(sizes) > 1:
        raise ManifestError(f"hashes of one group have {sorted(sizes)} bytes")
    return sizes.pop()


def _hashes(context: Any) -> dict[GroupId, list[BlockHash]]:
    hashes = {}
    for group_id, (size, joined) in context.items():
        if type(group_id) is not int or group_id < 0 or type(joined) is not bytes:
            raise ManifestError("a context is not hashes by group")
        if type(size) is not int or size not in _HASH_BYTES or len(joined) % size:
            raise ManifestError(f"{len(joined)} bytes of hashes of {size!r} bytes")
        hashes[GroupId(group_id)] = [
            BlockHash(joined[start : start + size])
            for start in range(0, len(joined), size)
        ]
    return hashes
