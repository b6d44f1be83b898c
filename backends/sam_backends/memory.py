"""The reference store: in this process, bounded, least recently used out first.

``memory://NAME?max_bytes=1GiB``. Stores of one name are one store.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from typing_extensions import override

from sam_connector.errors import (
    ConfigurationError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    BatchResult,
    Capabilities,
    Entry,
    ManifestRead,
    ManifestRecord,
    ManifestStore,
    Outcome,
    StoreBackend,
    WriteOutcome,
)
from sam_connector.storage.registry import OpenStore, StoreOptions, redact

_DEFAULT_MAX_BYTES = 1 << 30
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(slots=True)
class _Value:
    data: bytes
    expire_at: float


class MemoryData:
    """What stores of one name share. Thread-safe through ``lock``.

    Args:
        max_bytes: of all values together, and again of all manifests with their names.
        now: monotonic seconds.
    """

    def __init__(
        self,
        max_bytes: int = _DEFAULT_MAX_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.now = now
        self.lock = threading.Lock()
        self.num_bytes = 0
        # Least recently used first.
        self._values: dict[str, _Value] = {}
        self.manifests: dict[str, tuple[ManifestRecord, float]] = {}
        self._num_manifest_bytes = 0

    def find(self, name: str) -> _Value | None:
        """A value that lives; its order is unchanged."""
        value = self._values.get(name)
        if value is not None and value.expire_at <= self.now():
            self.remove(name)
            return None
        return value

    def use(self, name: str) -> None:
        self._values[name] = self._values.pop(name)

    def insert(self, name: str, value: _Value) -> bool:
        """Makes room for a value; False if there can be none."""
        if len(value.data) > self.max_bytes:
            return False
        self.remove(name)
        while self.num_bytes + len(value.data) > self.max_bytes:
            self.remove(next(iter(self._values)))
        self._values[name] = value
        self.num_bytes += len(value.data)
        return True

    def remove(self, name: str) -> bool:
        value = self._values.pop(name, None)
        if value is not None:
            self.num_bytes -= len(value.data)
        return value is not None

    def find_manifest(self, name: str) -> ManifestRecord | None:
        """One that lives."""
        known = self.manifests.get(name)
        if known is not None and known[1] <= self.now():
            self.remove_manifest(name)
            return None
        return None if known is None else known[0]

    def insert_manifest(
        self, name: str, record: ManifestRecord, expire_at: float
    ) -> bool:
        """Writes one unless there is no room; those that live are not put out."""
        num_bytes = len(name) + len(record.data)
        num_freed = 0
        if (known := self.find_manifest(name)) is not None:
            num_freed = len(name) + len(known.data)
        if self._num_manifest_bytes + num_bytes - num_freed > self.max_bytes:
            for other in list(self.manifests):
                self.find_manifest(other)
        if self._num_manifest_bytes + num_bytes - num_freed > self.max_bytes:
            return False
        self.remove_manifest(name)
        self.manifests[name] = record, expire_at
        self._num_manifest_bytes += num_bytes
        return True

    def remove_manifest(self, name: str) -> None:
        known = self.manifests.pop(name, None)
        if known is not None:
            self._num_manifest_bytes -= len(name) + len(known[0].data)


class MemoryStore(StoreBackend):
    """Values in a ``MemoryData``."""

    def __init__(self, data: MemoryData) -> None:
        self._data = data
        self._is_closed = False

    @property
    @override
    def capabilities(self) -> Capabilities:
        return Capabilities(
            exact_ttl=True,
            touch=True,
            delete=True,
            is_shared=False,
            max_value_bytes=self._data.max_bytes,
        )

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        _check_ttl(ttl_s)

        def put_one(entry: Entry) -> Outcome:
            name = str(entry.key)
            expire_at = self._data.now() + ttl_s
            known = self._data.find(name)
            if known is not None:
                expire_at = max(expire_at, known.expire_at)
            fits = self._data.insert(name, _Value(b"".join(entry.buffers), expire_at))
            return Outcome.DONE if fits else Outcome.FULL

        return self._each(entries, put_one, deadline)

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        def get_one(entry: Entry) -> Outcome:
            value = self._data.find(str(entry.key))
            if value is None or len(value.data) != entry.num_bytes:
                return Outcome.MISSING
            self._data.use(str(entry.key))
            data = memoryview(value.data)
            start = 0
            for buffer in entry.buffers:
                buffer[:] = data[start : start + len(buffer)]
                start += len(buffer)
            return Outcome.DONE

        return self._each(entries, get_one, deadline)

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return self._each(
            keys, lambda key: _there(self._data.find(str(key)) is not None), deadline
        )

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        _check_ttl(ttl_s)

        def touch_one(key: StoreKey) -> Outcome:
            value = self._data.find(str(key))
            if value is None:
                return Outcome.MISSING
            value.expire_at = max(value.expire_at, self._data.now() + ttl_s)
            self._data.use(str(key))
            return Outcome.DONE

        return self._each(keys, touch_one, deadline)

    @override
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        def delete_one(key: StoreKey) -> Outcome:
            is_there = self._data.find(str(key)) is not None
            self._data.remove(str(key))
            return _there(is_there)

        return self._each(keys, delete_one, deadline)

    @override
    def close(self) -> None:
        self._is_closed = True

    def _each(
        self,
        items: Sequence[Entry] | Sequence[StoreKey],
        call: Callable[..., Outcome],
        deadline: float,
    ) -> BatchResult:
        error: StoreError | None = None
        outcomes = []
        for item in items:
            failure = _failure(deadline, is_closed=self._is_closed)
            if failure is not None:
                error = error or failure
                outcomes.append(Outcome.FAILED)
                continue
            with self._data.lock:
                outcomes.append(call(item))
        if error is None and Outcome.FULL in outcomes:
            error = StoreFull(f"a value exceeds {self._data.max_bytes} bytes")
        return BatchResult(outcomes, error)


class MemoryManifests(ManifestStore):
    """Manifests in a ``MemoryData``."""

    def __init__(self, data: MemoryData) -> None:
        self._data = data
        self._is_closed = False

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        _check_ttl(ttl_s)
        if self._failure(deadline) is not None:
            return WriteOutcome.FAILED
        with self._data.lock:
            known = self._data.find_manifest(str(key))
            if known is not None and known.version >= record.version:
                return WriteOutcome.OUTDATED
            expire_at = self._data.now() + ttl_s
            fits = self._data.insert_manifest(str(key), record, expire_at)
        return WriteOutcome.DONE if fits else WriteOutcome.FULL

    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        failure = self._failure(deadline)
        if failure is not None:
            return ManifestRead(Outcome.FAILED, error=failure)
        with self._data.lock:
            record = self._data.find_manifest(str(key))
        if record is None or len(record.data) > max_bytes:
            return ManifestRead(Outcome.MISSING)
        return ManifestRead(Outcome.DONE, record)

    @override
    def touch(self, key: ManifestKey, *, ttl_s: float, deadline: float) -> Outcome:
        _check_ttl(ttl_s)
        if self._failure(deadline) is not None:
            return Outcome.FAILED
        with self._data.lock:
            record = self._data.find_manifest(str(key))
            if record is None:
                return Outcome.MISSING
            _, expire_at = self._data.manifests[str(key)]
            expire_at = max(expire_at, self._data.now() + ttl_s)
            self._data.manifests[str(key)] = record, expire_at
        return Outcome.DONE

    @override
    def close(self) -> None:
        self._is_closed = True

    def _failure(self, deadline: float) -> StoreError | None:
        return _failure(deadline, is_closed=self._is_closed)


_stores: dict[str, MemoryData] = {}
_stores_lock = threading.Lock()


def open_store(url: str, options: StoreOptions) -> OpenStore:
    """The store of the URL's name; an unnamed one is its own.

    Whoever opens a name first decides how much it holds.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError([f"store {redact(url)}: {error}"]) from error
    max_bytes = _DEFAULT_MAX_BYTES
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        size = _size(value) if name == "max_bytes" else None
        if size is None:
            raise ConfigurationError([f"store: {name}={value!r} in a memory:// URL"])
        max_bytes = size
    name = parts.netloc + parts.path
    data = MemoryData(max_bytes)
    if name:
        with _stores_lock:
            data = _stores.setdefault(name, data)
    return OpenStore(MemoryStore(data), MemoryManifests(data))


def _size(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)\s*(|[KMG]iB)", text.strip(), re.IGNORECASE)
    return None if found is None else int(found[1]) * _UNITS[found[2].upper()]


def _check_ttl(ttl_s: float) -> None:
    if not ttl_s > 0 or not math.isfinite(ttl_s):
        raise ValueError(f"ttl_s must be more than 0 and finite; got {ttl_s}")


def _failure(deadline: float, *, is_closed: bool) -> StoreError | None:
    if is_closed:
        return StoreUnavailable("the store is closed")
    if time.monotonic() >= deadline:
        return StoreTimeout("the deadline has passed")
    return None


def _there(is_there: bool) -> Outcome:
    return Outcome.DONE if is_there else Outcome.MISSING
