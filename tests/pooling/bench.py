"""Small things that the tests of this package are written with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryManifests, MemoryStore
from sam_connector.core.clock import MonotonicClock
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.events import PoolEvent
from sam_connector.pooling.key_space import Chunk, KeySpace
from sam_connector.pooling.manager import SessionPoolingManager
from sam_connector.pooling.manifest import ManifestContext
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, Outcome

FINGERPRINT = "ab" * 16


def chunk(letter: str, group_id: int = 0) -> Chunk:
    return GroupId(group_id), BlockHash(letter.encode().ljust(32, b"."))


def chunks(letters: str) -> list[Chunk]:
    return [chunk(letter) for letter in letters]


def letters(found: Sequence[Chunk]) -> str:
    return "".join(block_hash[:1].decode() for _, block_hash in found)


def session(name: str, tenant: str = "t") -> SessionKey:
    return SessionKey(tenant, name)


def key_space(**changes: Any) -> KeySpace:
    fields: dict[str, Any] = {
        "tenant": "",
        "fingerprint": FINGERPRINT,
        "num_ranks": 2,
        "num_parts": {GroupId(0): 1},
    }
    return KeySpace(**(fields | changes))


class GatedStore(MemoryStore):
    """A store that can be held, and told to fail or to raise."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.raises = False
        self.asked: list[tuple[str, list[StoreKey]]] = []

    def _pass(self, name: str, keys: Sequence[StoreKey]) -> BatchResult | None:
        self.asked.append((name, list(keys)))
        assert self.gate.wait(10)
        if self.raises:
            raise RuntimeError("a backend that breaks its contract")
        if self.fails:
            return BatchResult([Outcome.FAILED] * len(keys))
        return None

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        deadline = time.monotonic() + 5
        return self._pass("exists", keys) or super().exists(keys, deadline=deadline)

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        answer = self._pass("touch", keys)
        return answer or super().touch(keys, ttl_s=ttl_s, deadline=deadline)


class Bench:
    """A pooling manager on a store in memory."""

    def __init__(self, data: MemoryData | None = None, **config: Any) -> None:
        self.data = data or MemoryData()
        self.store = GatedStore(self.data)
        self.manifests = MemoryManifests(self.data)
        self.wakes = 0
        self.wall = time.time()
        self.spm = SessionPoolingManager(
            self.store,
            self.manifests,
            key_space(),
            PoolingConfig(**({"lookup_timeout_s": 5.0, "retry_s": 0.01} | config)),
            block_sizes={GroupId(0): 16},
            clock=MonotonicClock(),
            wall_clock=lambda: self.wall,
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def close(self) -> None:
        self.store.gate.set()
        self.spm.close()

    def put(self, found: str) -> None:
        """The store has these chunks, of both ranks."""
        entries = [
            Entry(key, [memoryview(b"x")])
            for c in chunks(found)
            for key in key_space().keys(c)
        ]
        self.store.put(entries, ttl_s=60, deadline=time.monotonic() + 5)

    def lookup(self, wanted: str) -> list[bool | None]:
        return self.spm.lookup(chunks(wanted))

    def found(self, wanted: str) -> list[bool | None]:
        """The answers once there are some."""
        eventually(lambda: None not in self.lookup(wanted))
        return self.lookup(wanted)

    def publish(self, name: str, text: str, **more: Any) -> None:
        context = ManifestContext({GroupId(0): [c[1] for c in chunks(text)]})
        fields: dict[str, Any] = {"parent": None, "lease_s": 0.0}
        self.spm.publish(session(name), [context], **(fields | more))

    def event(self) -> PoolEvent:
        """The one event there is."""
        eventually(lambda: self.spm.has_events)
        [event] = self.spm.take_events()
        return event


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
