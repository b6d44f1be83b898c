"""A store in memory that fails, forgets, lies and takes its time, at random.

``flaky://NAME?seed=1&trouble=0.1``: stores of one name share what they keep. Whoever
uses it has to register it first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryManifests, MemoryStore
from sam_connector.errors import StoreUnavailable
from sam_connector.storage import registry
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    BatchResult,
    Entry,
    ManifestRead,
    ManifestRecord,
    Outcome,
    WriteOutcome,
)
from sam_connector.storage.registry import OpenStore, StoreOptions

DOWN = StoreUnavailable("as it pleases")

_data: dict[str, MemoryData] = {}


def register() -> None:
    """Makes ``flaky://`` known; may be called again."""
    if "flaky" not in registry.known_schemes():
        registry.register("flaky", f"{__name__}:open_store")


def open_store(url: str, options: StoreOptions) -> OpenStore:
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    data = _data.setdefault(parts.netloc, MemoryData())
    rng = random.Random(f"{query.get('seed')}/{len(_data)}")
    trouble = float(query.get("trouble", 0.0))
    return OpenStore(FlakyStore(data, rng, trouble), FlakyManifests(data, rng, trouble))


class FlakyStore(MemoryStore):
    def __init__(self, data: MemoryData, rng: random.Random, trouble: float) -> None:
        super().__init__(data)
        self._rng = rng
        self._trouble = trouble

    def _is_trouble(self) -> bool:
        return self._rng.random() < self._trouble

    def _disturbed(self, result: BatchResult) -> BatchResult:
        """Some of the outcomes are worse than they were."""
        if self._rng.random() < 0.3:
            time.sleep(self._rng.random() * 0.004)
        outcomes = [
            self._rng.choice((Outcome.FAILED, Outcome.MISSING))
            if self._is_trouble()
            else outcome
            for outcome in result.outcomes
        ]
        failed = Outcome.FAILED in outcomes
        return BatchResult(outcomes, DOWN if failed else result.error)

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return self._disturbed(super().put(entries, ttl_s=ttl_s, deadline=deadline))

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        result = super().get(entries, deadline=deadline)
        for entry in entries:
            if self._is_trouble():
                entry.buffers[-1][0] ^= 0xFF
            if self._is_trouble():
                entry.buffers[0][10] ^= 0xFF
        return self._disturbed(result)

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        result = super().exists(keys, deadline=deadline)
        if self._is_trouble():  # it says that it has what it has not
            result = BatchResult([Outcome.DONE] * len(keys))
        return self._disturbed(result)

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return self._disturbed(super().touch(keys, ttl_s=ttl_s, deadline=deadline))


class FlakyManifests(MemoryManifests):
    def __init__(self, data: MemoryData, rng: random.Random, trouble: float) -> None:
        super().__init__(data)
        self._rng = rng
        self._trouble = trouble

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        if self._rng.random() < self._trouble:
            return self._rng.choice((WriteOutcome.FAILED, WriteOutcome.FULL))
        return super().write(key, record, ttl_s=ttl_s, deadline=deadline)

    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        if self._rng.random() < self._trouble:
            return ManifestRead(Outcome.FAILED, error=DOWN)
        read = super().read(key, max_bytes=max_bytes, deadline=deadline)
        if read.record is not None and self._rng.random() < self._trouble:
            record = ManifestRecord(read.record.version, read.record.data[::-1])
            return ManifestRead(Outcome.DONE, record)
        return read
