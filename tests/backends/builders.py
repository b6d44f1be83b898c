"""Names, values and deadlines for tests of stores."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import Entry
from sam_connector.storage.registry import StoreOptions

OPTIONS = StoreOptions(connect_timeout_s=1.0)


def soon(seconds: float = 15.0) -> float:
    return time.monotonic() + seconds


def make_key(number: int) -> StoreKey:
    block_hash = BlockHash(number.to_bytes(32, "big"))
    return StoreKey("tenant", "f00d", GroupId(0), 0, block_hash)


def make_keys(count: int, start: int = 0) -> list[StoreKey]:
    return [make_key(number) for number in range(start, start + count)]


def make_manifest_key(session_id: str = "session") -> ManifestKey:
    return ManifestKey(SessionKey("tenant", session_id), "f00d")


def content(key: StoreKey, num_bytes: int) -> bytes:
    return random.Random(str(key)).randbytes(num_bytes)


def source(key: StoreKey, num_bytes: int = 100) -> Entry:
    return Entry(key, [memoryview(content(key, num_bytes))])


def target(key: StoreKey, num_bytes: int = 100) -> Entry:
    return Entry(key, [memoryview(bytearray(num_bytes))])


def sources(keys: Sequence[StoreKey], num_bytes: int = 100) -> list[Entry]:
    return [source(key, num_bytes) for key in keys]


def targets(keys: Sequence[StoreKey], num_bytes: int = 100) -> list[Entry]:
    return [target(key, num_bytes) for key in keys]


def is_right(entry: Entry) -> bool:
    """Whether an entry has the bytes of its name."""
    return b"".join(entry.buffers) == content(entry.key, entry.num_bytes)
