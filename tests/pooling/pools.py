"""Pooling managers on real stores that misbehave when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryManifests, MemoryStore
from sam_connector.core.clock import Clock, MonotonicClock
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.errors import StoreUnavailable
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.events import PoolEvent
from sam_connector.pooling.key_space import Chunk
from sam_connector.pooling.manager import SessionPoolingManager
from sam_connector.pooling.manifest import (
    Manifest,
    ManifestContext,
    ManifestLimits,
    decode,
    encode,
)
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    BatchResult,
    Entry,
    ManifestRead,
    ManifestRecord,
    Outcome,
    WriteOutcome,
)
from tests.pooling.bench import eventually, key_space, session

GROUP = GroupId(0)
KEYS = key_space()
S = session("s")

#: Longer than anything takes that does not hang.
PATIENCE_S = 10.0


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def numbered(*numbers: int) -> list[Chunk]:
    return [(GROUP, block_hash(number)) for number in numbers]


def context(*numbers: int) -> ManifestContext:
    return ManifestContext({GROUP: [block_hash(number) for number in numbers]})


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


class TroubledStore(MemoryStore):
    """Calls wait at gates, fail, or bring something else than the truth.

    Attributes:
        is_down: every call fails.
        spoil: applied to every result, if set: a lie, or an exception.
        gate: calls wait for it before they reach the store.
        gate_behind: calls wait for it with their result.
        calls: names of the calls, and how many keys they were about.
    """

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.is_down = False
        self.spoil: Callable[[BatchResult], BatchResult] | None = None
        self.gate = open_gate()
        self.gate_behind = open_gate()
        self.calls: list[tuple[str, int]] = []

    def _call(
        self, name: str, num_keys: int, call: Callable[[], BatchResult]
    ) -> BatchResult:
        self.calls.append((name, num_keys))
        self.gate.wait(PATIENCE_S)
        if self.is_down:
            result = BatchResult([Outcome.FAILED] * num_keys, StoreUnavailable("down"))
        else:
            result = call()
        self.gate_behind.wait(PATIENCE_S)
        return result if self.spoil is None else self.spoil(result)

    def count(self, name: str) -> int:
        return sum(name == called for called, _ in self.calls)

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        call = super().exists
        return self._call("exists", len(keys), lambda: call(keys, deadline=soon()))

    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        call = super().touch
        return self._call(
            "touch", len(keys), lambda: call(keys, ttl_s=ttl_s, deadline=soon())
        )

    @override
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        call = super().delete
        return self._call("delete", len(keys), lambda: call(keys, deadline=soon()))

    def write(self, wanted: Sequence[Chunk], *, ttl_s: float = 3_600.0) -> None:
        """As all ranks do it."""
        entries = [
            Entry(key, [memoryview(b"block")])
            for item in wanted
            for key in KEYS.keys(item)
        ]
        outcomes = self.put(entries, ttl_s=ttl_s, deadline=soon()).outcomes
        assert set(outcomes) == {Outcome.DONE}

    def empty(self, wanted: Sequence[Chunk]) -> None:
        """As a server does that was restarted."""
        names = [key for item in wanted for key in KEYS.keys(item)]
        super().delete(names, deadline=soon())

    def has(self, wanted: Sequence[Chunk]) -> bool:
        names = [key for item in wanted for key in KEYS.keys(item)]
        outcomes = super().exists(names, deadline=soon()).outcomes
        return set(outcomes) == {Outcome.DONE}


class TroubledManifests(MemoryManifests):
    """The same for manifests.

    Attributes:
        is_down: every call fails.
        num_failures: so many calls fail, then none.
        fails_with: is raised instead.
        gate: calls wait for it before they reach the store.
    """

    def __init__(self, data: MemoryData) -> None:
        super().__init__(data)
        self.is_down = False
        self.num_failures = 0
        self.fails_with: Exception | None = None
        self.gate = open_gate()
        self.num_writes = 0
        self.num_reads = 0

    def _has_trouble(self) -> bool:
        self.gate.wait(PATIENCE_S)
        if self.fails_with is not None:
            raise self.fails_with
        if self.num_failures:
            self.num_failures -= 1
            return True
        return self.is_down

    @override
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        self.num_writes += 1
        if self._has_trouble():
            return WriteOutcome.FAILED
        return super().write(key, record, ttl_s=ttl_s, deadline=soon())

    @override
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        self.num_reads += 1
        if self._has_trouble():
            return ManifestRead(Outcome.FAILED, error=StoreUnavailable("down"))
        return super().read(key, max_bytes=max_bytes, deadline=soon())

    def record(self, owner: SessionKey) -> ManifestRecord | None:
        """What another engine would find."""
        name = KEYS.manifest_key(owner)
        return super().read(name, max_bytes=1 << 30, deadline=soon()).record

    def put(self, owner: SessionKey, version: int, data: bytes) -> WriteOutcome:
        """As another engine writes."""
        record = ManifestRecord(version, data)
        name = KEYS.manifest_key(owner)
        return super().write(name, record, ttl_s=3_600.0, deadline=soon())


class Pool:
    """A pooling manager that is closed and checked in the end.

    Attributes:
        wall: wall clock, seconds; stands still unless it is set.
        num_wakes: calls of ``wake``.
    """

    def __init__(
        self,
        config: PoolingConfig | None = None,
        *,
        data: MemoryData | None = None,
        clock: Clock | None = None,
        wall: float = 1_000.0,
        has_manifests: bool = True,
    ) -> None:
        self.data = data or MemoryData()
        self.store = TroubledStore(self.data)
        self.manifests = TroubledManifests(self.data)
        self.wall = wall
        self.num_wakes = 0
        self.spm = SessionPoolingManager(
            self.store,
            self.manifests if has_manifests else None,
            KEYS,
            config or PoolingConfig(lookup_timeout_s=5.0, retry_s=0.001),
            block_sizes={GROUP: 16},
            clock=clock or MonotonicClock(),
            wall_clock=lambda: self.wall,
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.num_wakes += 1

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *args: object) -> None:
        self.open_gates()
        self.spm.check_integrity()
        self.spm.close()

    def open_gates(self) -> None:
        for gate in (self.store.gate, self.store.gate_behind, self.manifests.gate):
            gate.set()

    def ask(self, *numbers: int) -> list[bool | None]:
        """Looks up until there is an answer."""
        wanted = numbered(*numbers)
        eventually(lambda: None not in self.spm.lookup(wanted))
        return self.spm.lookup(wanted)

    def event(self) -> PoolEvent:
        """The one thing that was found out."""
        eventually(lambda: self.spm.has_events)
        (event,) = self.spm.take_events()
        return event

    def events(self, count: int) -> list[PoolEvent]:
        """So many, and no more."""
        found: list[PoolEvent] = []

        def have_all() -> bool:
            found.extend(self.spm.take_events())
            return len(found) >= count and not self.spm.num_open

        eventually(have_all)
        found.extend(self.spm.take_events())
        assert len(found) == count
        return found

    def publish(self, owner: SessionKey, *numbers: int, lease_s: float = 60.0) -> None:
        self.spm.publish(owner, [context(*numbers)], parent=None, lease_s=lease_s)


def stored(pool: Pool) -> Manifest | None:
    """The session, as another engine would find it."""
    record = pool.manifests.record(S)
    if record is None or record.is_tombstone:
        return None
    return decode(record.data, S, ManifestLimits())


def other_engines(*numbers: int, version: int) -> bytes:
    return encode(
        Manifest(
            session=S,
            contexts=[context(*numbers)],
            block_sizes={GROUP: 16},
            version=version,
        )
    )
