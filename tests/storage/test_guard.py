"""The breaker: closed, open, half open; one call to see, and then all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest
from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryManifests, MemoryStore
from sam_connector.core.clock import ManualClock
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from sam_connector.storage.guard import (
    BreakerState,
    CircuitBreaker,
    GuardedManifests,
    GuardedStore,
)
from sam_connector.storage.key import ManifestKey, StoreKey
from sam_connector.storage.port import (
    BatchResult,
    ManifestRecord,
    Outcome,
    WriteOutcome,
)

KEY = StoreKey("", "ab", GroupId(0), 0, BlockHash(bytes(32)))
DOWN = StoreUnavailable("refused")


class Flaky(MemoryStore):
    """A store that answers as it is told."""

    def __init__(self) -> None:
        super().__init__(MemoryData())
        self.error: StoreError | None = None
        self.raises = False
        self.num_calls = 0

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        self.num_calls += 1
        if self.raises:
            raise RuntimeError("a backend that breaks its contract")
        if self.error is None:
            return super().exists(keys, deadline=deadline)
        kind = Outcome.FULL if isinstance(self.error, StoreFull) else Outcome.FAILED
        return BatchResult([kind] * len(keys), self.error)


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.breaker = CircuitBreaker("redis://host", self.clock)
        self.backend = Flaky()
        self.store = GuardedStore(self.backend, self.breaker)

    def ask(self) -> BatchResult:
        return self.store.exists([KEY, KEY], deadline=time.monotonic() + 5)

    def break_it(self, error: StoreError = DOWN) -> None:
        self.backend.error = error
        for _ in range(3):
            self.ask()

    @property
    def state(self) -> BreakerState:
        return self.breaker.state


def test_it_opens_after_three_failures_in_a_row() -> None:
    bench = Bench()
    bench.backend.error = DOWN
    bench.ask()
    bench.ask()
    bench.backend.error = None
    bench.ask()
    bench.backend.error = DOWN
    bench.ask()
    bench.ask()
    assert bench.state is BreakerState.CLOSED
    bench.ask()
    assert bench.state is BreakerState.OPEN


def test_d07_while_it_is_open_the_store_is_not_asked() -> None:
    bench = Bench()
    bench.break_it()
    num_calls = bench.backend.num_calls
    for _ in range(100):
        result = bench.ask()
        assert result.outcomes == [Outcome.FAILED, Outcome.FAILED]
        assert isinstance(result.error, StoreUnavailable)
    assert bench.backend.num_calls == num_calls


def test_after_a_pause_one_call_is_let_through_and_closes_it() -> None:
    bench = Bench()
    bench.break_it()
    bench.backend.error = None
    bench.clock.advance(0.6)
    assert bench.ask().outcomes == [Outcome.MISSING, Outcome.MISSING]
    assert bench.state is BreakerState.CLOSED


def test_pauses_grow_up_to_a_bound() -> None:
    bench = Bench()
    bench.break_it()
    pauses = []
    for _ in range(8):
        begin, num_calls = bench.clock.now(), bench.backend.num_calls
        while bench.backend.num_calls == num_calls:
            bench.clock.advance(0.05)
            bench.ask()
        pauses.append(bench.clock.now() - begin)
    assert pauses[0] < 0.6
    assert pauses[-1] > 4.9
    assert max(pauses) < 10.1


def test_of_many_threads_one_is_let_through() -> None:
    bench = Bench()
    bench.break_it()
    bench.clock.advance(60.0)
    go, allowed = threading.Barrier(8), []

    def ask() -> None:
        go.wait()
        allowed.append(bench.breaker.allows())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(allowed) == 1


def test_wrong_credentials_open_it_at_once() -> None:
    bench = Bench()
    bench.backend.error = StoreDenied("WRONGPASS")
    bench.ask()
    assert bench.state is BreakerState.OPEN


def test_a_store_that_is_full_is_in_service() -> None:
    bench = Bench()
    bench.break_it(StoreFull("OOM"))
    assert bench.state is BreakerState.CLOSED


def test_a_backend_that_raises_counts_as_failed() -> None:
    bench = Bench()
    bench.backend.raises = True
    for _ in range(3):
        with pytest.raises(RuntimeError):
            bench.ask()
    assert bench.state is BreakerState.OPEN


def test_a_change_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.INFO, logger="sam_connector"):
        bench.break_it(StoreTimeout("no answer"))
        for _ in range(50):
            bench.clock.advance(1.0)
            bench.ask()
        bench.backend.error = None
        bench.clock.advance(60.0)
        bench.ask()
    assert [record.getMessage() for record in caplog.records] == [
        "store redis://host is out of service: no answer",
        "store redis://host is in service again",
    ]


def test_counts_are_for_operators() -> None:
    bench = Bench()
    bench.break_it(StoreTimeout("no answer"))
    stats = bench.breaker.stats()
    assert stats["state"] == "open"
    assert (stats["failures"], stats["timeouts"], stats["opened"]) == (3, 3, 1)


def test_manifests_share_the_breaker() -> None:
    bench = Bench()
    manifests = GuardedManifests(MemoryManifests(MemoryData()), bench.breaker)
    key = ManifestKey(SessionKey("", "s"), "ab")
    deadline = time.monotonic() + 5

    def write() -> WriteOutcome:
        record = ManifestRecord(1, b"x")
        return manifests.write(key, record, ttl_s=9, deadline=deadline)

    assert write() is WriteOutcome.DONE
    bench.break_it()
    assert write() is WriteOutcome.FAILED
    assert manifests.read(key, max_bytes=9, deadline=deadline).outcome is Outcome.FAILED
    assert manifests.touch(key, ttl_s=9, deadline=deadline) is Outcome.FAILED
