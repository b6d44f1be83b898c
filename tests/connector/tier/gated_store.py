"""A store in memory whose reads and writes of values can be held.

``gated://NAME``: stores of one name share what they keep. Whoever uses it has to
register it first.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryManifests, MemoryStore
from sam_connector.storage import registry
from sam_connector.storage.port import BatchResult, Entry
from sam_connector.storage.registry import OpenStore, StoreOptions

_MAX_HOLD_S = 20.0

data: defaultdict[str, MemoryData] = defaultdict(MemoryData)


class Gate:
    """Holds calls while it is closed, and notes that one has come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.has_caller = threading.Event()

    def close(self) -> None:
        self.has_caller.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def enter(self) -> None:
        self.has_caller.set()
        self._open.wait(_MAX_HOLD_S)


reads, writes = Gate(), Gate()


def register() -> None:
    """Makes ``gated://`` known; may be called again."""
    if "gated" not in registry.known_schemes():
        registry.register("gated", f"{__name__}:open_store")


def open_store(url: str, options: StoreOptions) -> OpenStore:
    found = data[url.partition("://")[2]]
    return OpenStore(GatedStore(found), MemoryManifests(found))


class GatedStore(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        writes.enter()
        return super().put(entries, ttl_s=ttl_s, deadline=time.monotonic() + 5)

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        reads.enter()
        return super().get(entries, deadline=time.monotonic() + 5)
