"""The breaker: closed, open, half open; one call to see, and then all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

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
from sam_connector.storage.conformance import BLOCK_CHECKS, MANIFEST_CHECKS
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
        self.gives_no_reason = False
        self.num_calls = 0

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        self.num_calls += 1
        if self.raises:
            raise RuntimeError("a backend that breaks its contract")
        if self.gives_no_reason:
            return BatchResult([Outcome.FAILED] * len(keys))
        if self.error is None:
            return super().exists(keys, deadline=deadline)
        kind = Outcome.FULL if isinstance(self.error, StoreFull) else Outcome.FAILED
        return BatchResult([kind] * len(keys), self.error)


class Bench:
    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.heard: list[BreakerState] = []
        self.breaker = CircuitBreaker(
            "redis://host",
            self.clock,
            on_change=lambda: self.heard.append(self.breaker.state),
        )
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


class SlowClock(ManualClock):
    """Lets other threads run whenever it is asked."""

    @override
    def now(self) -> float:
        time.sleep(0.002)
        return super().now()


def test_of_many_threads_one_is_let_through() -> None:
    bench = Bench(SlowClock())
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


def test_wrong_credentials_and_then_another_failure() -> None:
    """One failure is enough to go on waiting, though fewer than three in a row."""
    bench = Bench()
    bench.backend.error = StoreDenied("WRONGPASS")
    bench.ask()
    bench.backend.error = DOWN
    bench.clock.advance(60.0)
    bench.ask()
    assert bench.state is BreakerState.OPEN
    bench.backend.error = None
    bench.clock.advance(60.0)
    bench.ask()
    assert bench.state is BreakerState.CLOSED


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


def test_a_change_is_told_once() -> None:
    bench = Bench()
    bench.break_it()
    for _ in range(5):
        bench.clock.advance(60.0)
        bench.ask()
    bench.backend.error = None
    bench.clock.advance(60.0)
    bench.ask()
    bench.ask()
    assert bench.heard == [BreakerState.OPEN, BreakerState.CLOSED]


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


def test_manifests_that_fail_open_it_too() -> None:
    bench = Bench()
    backend = MemoryManifests(MemoryData())
    manifests = GuardedManifests(backend, bench.breaker)
    key, deadline = ManifestKey(SessionKey("", "s"), "ab"), time.monotonic() + 5
    backend.close()
    assert manifests.touch(key, ttl_s=9, deadline=deadline) is Outcome.FAILED
    manifests.read(key, max_bytes=9, deadline=deadline)
    assert bench.state is BreakerState.CLOSED
    record = ManifestRecord(1, b"x")
    manifests.write(key, record, ttl_s=9, deadline=deadline)
    assert bench.state is BreakerState.OPEN
    read = manifests.read(key, max_bytes=9, deadline=deadline)
    assert isinstance(read.error, StoreUnavailable)


def test_an_empty_batch_proves_nothing() -> None:
    bench = Bench()
    bench.break_it()
    bench.clock.advance(60.0)
    num_calls = bench.backend.num_calls
    assert bench.store.exists([], deadline=time.monotonic() + 5).outcomes == []
    assert bench.backend.num_calls == num_calls
    assert bench.state is BreakerState.OPEN


def test_a_caller_s_mistake_is_not_the_store_s() -> None:
    bench = Bench()
    deadline = time.monotonic() + 5
    for _ in range(5):
        with pytest.raises(ValueError, match="ttl_s"):
            bench.store.touch([KEY], ttl_s=0, deadline=deadline)
    assert bench.state is BreakerState.CLOSED
    bench.break_it()
    bench.clock.advance(60.0)
    with pytest.raises(ValueError, match="ttl_s"):
        bench.store.touch([KEY], ttl_s=0, deadline=deadline)
    bench.backend.error = None
    bench.ask()
    assert bench.state is BreakerState.CLOSED


def test_a_failure_without_a_reason_is_one() -> None:
    bench = Bench()
    bench.backend.gives_no_reason = True
    bench.break_it()
    assert bench.state is BreakerState.OPEN


def test_failures_of_calls_that_had_begun_do_not_lengthen_the_pause() -> None:
    bench = Bench()
    for _ in range(20):
        assert bench.breaker.allows()
    for _ in range(20):
        bench.breaker.on_end(DOWN)
    assert bench.breaker.stats()["opened"] == 1
    bench.clock.advance(0.6)
    assert bench.breaker.allows()


def test_after_a_good_call_pauses_are_short_again() -> None:
    bench = Bench()
    bench.break_it()
    for _ in range(6):
        bench.clock.advance(60.0)
        bench.ask()
    bench.backend.error = None
    bench.clock.advance(60.0)
    bench.ask()
    bench.break_it()
    bench.clock.advance(0.6)
    assert bench.breaker.allows()
    assert bench.breaker.stats()["opened"] == 2


def test_while_one_call_is_under_way_the_others_fail_at_once() -> None:
    bench = Bench()
    bench.break_it()
    bench.backend.error = None
    bench.clock.advance(60.0)
    assert bench.breaker.allows()
    num_calls = bench.backend.num_calls
    assert bench.ask().outcomes == [Outcome.FAILED, Outcome.FAILED]
    assert bench.backend.num_calls == num_calls
    bench.breaker.on_end(None)
    assert bench.ask().outcomes == [Outcome.MISSING, Outcome.MISSING]


@pytest.mark.parametrize("check", BLOCK_CHECKS, ids=lambda check: check.__name__)
def test_a_guarded_store_keeps_the_contract(check: Callable[..., None]) -> None:
    clock = ManualClock()
    data = MemoryData(now=clock.now)

    def open_one() -> GuardedStore:
        # It never opens: calls that give up are part of the contract.
        breaker = CircuitBreaker("memory://", clock, max_failures=100)
        return GuardedStore(MemoryStore(data), breaker)

    check(open_one, clock.advance)


@pytest.mark.parametrize("check", MANIFEST_CHECKS, ids=lambda check: check.__name__)
def test_guarded_manifests_keep_the_contract(check: Callable[..., None]) -> None:
    clock = ManualClock()
    data = MemoryData(now=clock.now)

    def open_one() -> GuardedManifests:
        breaker = CircuitBreaker("memory://", clock, max_failures=100)
        return GuardedManifests(MemoryManifests(data), breaker)

    check(open_one, clock.advance)
