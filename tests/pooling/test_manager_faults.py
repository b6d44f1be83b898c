"""The pooling manager when the store, or the order of things, is against it."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from sam_backends.embedded import EmbeddedServer
from sam_backends.memory import MemoryData
from sam_backends.redis_store import open_store
from sam_connector.core.clock import MonotonicClock
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.events import Ended, Published, Recalled
from sam_connector.pooling.manager import SessionPoolingManager
from sam_connector.storage.guard import CircuitBreaker, GuardedStore
from sam_connector.storage.port import BatchResult
from sam_connector.storage.registry import StoreOptions
from tests.backends.fault_proxy import Fault, FaultProxy
from tests.pooling.bench import eventually, session
from tests.pooling.pools import GROUP, KEYS, Pool, numbered

S = session("s")


def raise_it(result: BatchResult) -> BatchResult:
    raise RuntimeError("out of the blue")


def shorten(result: BatchResult) -> BatchResult:
    return BatchResult(result.outcomes[:-1])


def lengthen(result: BatchResult) -> BatchResult:
    return BatchResult([*result.outcomes, result.outcomes[0]])


def quick(**changes: float) -> PoolingConfig:
    """Times short enough to wait for."""
    config = PoolingConfig(lookup_timeout_s=5.0, retry_s=0.001, negative_ttl_s=0.05)
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


# --- look-ups ---------------------------------------------------------------------


@pytest.mark.parametrize("lie", [raise_it, shorten, lengthen])
def test_d03_a_question_that_gets_no_answer_is_asked_again(
    lie: Callable[[BatchResult], BatchResult], caplog: pytest.LogCaptureFixture
) -> None:
    """It is not "no" for ever, and what sessions have is not given up for it."""
    with Pool(quick()) as pool, caplog.at_level(logging.CRITICAL):
        pool.store.write(numbered(1))
        pool.spm.track(S, numbered(1))
        pool.store.spoil = lie
        assert pool.ask(1) == [False]
        assert pool.spm.num_chunks_of(S) == 1

        pool.store.spoil = None

        eventually(lambda: pool.ask(1) == [True])


def test_d03_a_store_that_raises_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pool(quick()) as pool, caplog.at_level(logging.ERROR):
        pool.store.spoil = raise_it
        for n in range(5):
            pool.ask(n)

    assert len(caplog.records) == 1


def test_d03_a_store_that_comes_up_late_is_used_from_then_on() -> None:
    with Pool(quick()) as pool:
        pool.store.is_down = True
        pool.store.write(numbered(1))
        assert pool.ask(1) == [False]
        pool.publish(S, 1)
        event = pool.event()
        assert event == Published(S)  # manifests are up

        pool.store.is_down = False

        eventually(lambda: pool.ask(1) == [True])


def test_h07_a_write_while_the_question_is_out_wins_over_its_answer() -> None:
    """The store said "no" when that was true; since then it was written here."""
    with Pool() as pool:
        pool.store.gate_behind.clear()
        assert pool.spm.lookup(numbered(1)) == [None]
        eventually(lambda: pool.store.count("exists") == 1)
        pool.spm.on_written(numbered(1))
        pool.spm.track(S, numbered(1))
        pool.open_gates()
        pool.ask(2)  # the thread is past the answer

        assert pool.spm.lookup(numbered(1)) == [True]
        assert pool.spm.is_known(numbered(1)[0])
        assert pool.spm.num_chunks_of(S) == 1


def test_d06_a_look_up_notices_a_store_that_was_emptied() -> None:
    """Between two refreshes, and without any failure that could tell."""
    with Pool(quick(positive_ttl_s=0.05)) as pool:
        pool.store.write(numbered(1, 2))
        pool.spm.on_written(numbered(1, 2))
        pool.spm.track(S, numbered(1, 2))
        assert pool.ask(1, 2) == [True, True]

        pool.store.empty(numbered(1, 2))

        eventually(lambda: pool.ask(1, 2) == [False, False])
        assert not pool.spm.is_known(numbered(1)[0])
        assert numbered(1)[0] not in pool.spm.chunks_of(S)
        # And an offload writes them again.
        pool.store.write(numbered(1, 2))
        pool.spm.on_written(numbered(1, 2))
        pool.spm.track(S, numbered(1, 2))
        assert pool.ask(1, 2) == [True, True]
        assert pool.spm.num_chunks_of(S) == 2


def test_questions_go_to_the_store_in_bounded_batches() -> None:
    with Pool(quick(max_batch=10)) as pool:
        pool.ask(*range(1))
        pool.store.gate.clear()
        pool.spm.lookup(numbered(*range(100, 135)))
        pool.open_gates()
        eventually(lambda: None not in pool.spm.lookup(numbered(*range(100, 135))))

        assert max(size for _, size in pool.store.calls) <= 10
        assert KEYS.num_ranks > 1  # it is values that are counted


def test_a_store_some_way_off_is_found_and_stays_in_service() -> None:
    """To connect takes longer than requests wait, and an answer nearly as long."""
    breaker = CircuitBreaker("s", MonotonicClock())
    with EmbeddedServer() as server, FaultProxy(server.socket_path) as proxy:
        commands = ("CLIENT", "SELECT", "EVALSHA", "EVAL")
        proxy.add(Fault(commands=commands, times=-1, delay_s=0.03))
        opened = open_store(f"{proxy.url}/3", StoreOptions(num_connections=1))
        spm = SessionPoolingManager(
            GuardedStore(opened.blocks, breaker),
            opened.manifests,
            KEYS,
            PoolingConfig(),
            block_sizes={GROUP: 16},
            clock=MonotonicClock(),
        )
        with closing(spm):
            for n in range(10):
                eventually(lambda n=n: None not in spm.lookup(numbered(n)))
            eventually(lambda: spm.stats()["store_lookups"] == 10)
            assert spm.stats()["store_lookups_failed"] == 0
            assert proxy.num_connections == 1
    assert breaker.stats()["failures"] == 0


def test_nobody_waits_behind_a_question_that_takes_too_long() -> None:
    with Pool(quick(lookup_timeout_s=0.05)) as pool:
        pool.store.write(numbered(1, 2))
        pool.store.gate.clear()
        assert pool.spm.lookup(numbered(1)) == [None]
        eventually(lambda: pool.spm.lookup(numbered(1)) == [False])

        assert pool.spm.lookup(numbered(2)) == [False]

        pool.open_gates()
        eventually(lambda: pool.spm.lookup(numbered(2)) == [True])
        assert pool.spm.lookup(numbered(3)) == [None]


# --- keep-alive -------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_values_outlive_their_ttl_while_their_lease_lives() -> None:
    ttl_s = 2.0
    with Pool(quick(ttl_s=ttl_s, keep_alive_interval_s=0.2)) as pool:
        leased, other = numbered(1, 2), numbered(3)
        pool.store.write(leased + other, ttl_s=ttl_s)
        pool.spm.track(S, leased)
        pool.spm.track(session("other"), other)
        pool.spm.set_lease(S, time.monotonic() + 1_000)

        eventually(lambda: not pool.store.has(other))
        time.sleep(ttl_s / 2)
        assert pool.store.has(leased)

        pool.spm.set_lease(S, 0.0)
        eventually(lambda: not pool.store.has(leased))


@pytest.mark.parametrize("lie", [raise_it, shorten])
def test_d03_keep_alive_goes_on_after_a_store_that_lies(
    lie: Callable[[BatchResult], BatchResult], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Pool(quick(keep_alive_interval_s=0.05)) as pool,
        caplog.at_level(logging.CRITICAL),
    ):
        pool.store.write(numbered(1))
        pool.spm.track(S, numbered(1))
        pool.store.spoil = lie
        pool.spm.set_lease(S, time.monotonic() + 1_000)
        eventually(lambda: pool.store.count("touch") >= 2)
        assert pool.spm.num_chunks_of(S) == 1

        pool.store.spoil = None

        eventually(lambda: pool.spm.stats()["store_refreshed"] >= 1)


def test_an_outage_makes_nobody_lose_what_the_store_still_has() -> None:
    with Pool(quick(keep_alive_interval_s=0.05)) as pool:
        pool.store.write(numbered(1))
        pool.spm.track(S, numbered(1))
        pool.store.is_down = True
        pool.spm.set_lease(S, time.monotonic() + 1_000)
        eventually(lambda: pool.store.count("touch") >= 2)
        pool.store.is_down = False
        eventually(lambda: pool.spm.stats()["store_refreshed"] >= 1)

        assert pool.spm.num_chunks_of(S) == 1


def test_a_value_written_while_its_refresh_finds_it_missing_is_not_given_up() -> None:
    with Pool(quick(keep_alive_interval_s=0.05)) as pool:
        pool.spm.track(S, numbered(1))
        pool.store.gate_behind.clear()
        pool.spm.set_lease(S, time.monotonic() + 1_000)
        eventually(lambda: pool.store.count("touch") == 1)
        pool.store.write(numbered(1))
        pool.spm.on_written(numbered(1))
        pool.open_gates()
        eventually(lambda: pool.spm.stats()["store_refreshed"] >= 1)

        assert pool.spm.num_chunks_of(S) == 1
        assert pool.spm.is_known(numbered(1)[0])


def test_look_ups_are_answered_while_another_call_hangs() -> None:
    """They have a thread of their own."""
    with Pool() as pool:
        pool.manifests.gate.clear()
        pool.spm.recall(S)
        eventually(lambda: pool.manifests.num_reads == 1)
        pool.store.write(numbered(1))

        assert pool.ask(1) == [True]


def test_a_session_forgotten_for_want_of_room_has_no_lease_any_more() -> None:
    with Pool(quick(max_tracked=4)) as pool:
        for n in range(10):
            pool.spm.track(session(str(n)), numbered(2 * n, 2 * n + 1))
            pool.spm.set_lease(session(str(n)), time.monotonic() + 1_000)

        stats = pool.spm.stats()
        assert stats["store_sessions"] == stats["store_leases"] == 2


# --- the end of sessions ----------------------------------------------------------


def test_a_purge_deletes_what_it_was_told_to_and_nothing_else() -> None:
    with Pool(quick(max_batch=3)) as pool:
        pool.store.write(numbered(*range(10)))
        pool.spm.on_written(numbered(*range(10)))
        pool.spm.track(S, numbered(*range(10)))
        pool.spm.track(session("other"), numbered(0, 1))

        tail = pool.spm.unshared_tail(S, numbered(*range(10)))
        ticket = pool.spm.end(S, purge_chunks=tail)
        assert not pool.spm.is_known(numbered(5)[0])
        event = pool.event()

        assert event == Ended(ticket, found=True)
        assert pool.store.has(numbered(0, 1))
        assert not any(pool.store.has(numbered(n)) for n in range(2, 10))
        assert pool.spm.chunks_of(session("other")) == numbered(0, 1)


def test_a_purge_that_the_store_did_not_do_says_so() -> None:
    with Pool() as pool:
        pool.store.is_down = True
        ticket = pool.spm.end(S, purge_chunks=numbered(1))
        event = pool.event()

        assert isinstance(event, Ended)
        assert event.ticket == ticket
        assert "down" in (event.reason or "")


# --- threads ----------------------------------------------------------------------


def test_no_method_waits_for_a_store_that_hangs() -> None:
    """Whatever the engine's thread calls returns while every call is stuck."""
    with Pool(quick(keep_alive_interval_s=0.05)) as pool:
        for gate in (pool.store.gate, pool.manifests.gate):
            gate.clear()
        pool.spm.track(S, numbered(1))
        pool.spm.set_lease(S, time.monotonic() + 1_000)
        pool.spm.lookup(numbered(9))
        eventually(lambda: {n for n, _ in pool.store.calls} == {"exists", "touch"})
        pool.spm.recall(S)

        begun = time.monotonic()
        for n in range(100):
            owner = session(str(n))
            pool.spm.lookup(numbered(n))
            pool.spm.on_written(numbered(n))
            pool.spm.on_missing(numbered(n))
            pool.spm.track(owner, numbered(n))
            pool.spm.set_lease(owner, begun + 1_000)
            pool.publish(owner, n)
            pool.spm.recall(owner)
            pool.spm.end(owner, purge_chunks=numbered(n))
            pool.spm.stats()
            pool.spm.take_events()
        pool.spm.clear("beef")
        assert time.monotonic() - begun < 5  # one call of the store takes ten


def test_close_is_bounded_when_the_store_hangs_and_can_be_repeated() -> None:
    pool = Pool(PoolingConfig(call_timeout_s=0.05))
    pool.store.gate.clear()
    pool.spm.lookup(numbered(1))
    eventually(lambda: pool.store.count("exists") == 1)

    begun = time.monotonic()
    pool.spm.close()
    pool.spm.close()

    assert time.monotonic() - begun < 8
    pool.open_gates()


def test_threads_end_with_the_manager() -> None:
    before = set(threading.enumerate())
    with Pool() as pool:
        pool.ask(1)
        assert len(set(threading.enumerate()) - before) == 2

    assert set(threading.enumerate()) <= before


def test_waking_the_engine_may_fail_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pool() as pool, caplog.at_level(logging.CRITICAL):
        pool.spm._wake = raise_it  # type: ignore[assignment]
        pool.publish(S, 1)
        ticket = pool.spm.recall(S)
        published, recalled = pool.events(2)

        assert published == Published(S)
        assert isinstance(recalled, Recalled)
        assert (recalled.ticket, recalled.reason) == (ticket, None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(4))
def test_every_call_has_exactly_one_event_whatever_happens(seed: int) -> None:
    """Two engines, one store that fails at times; turns, ends and resets at random."""
    rng = random.Random(seed)
    data = MemoryData()
    config = quick(keep_alive_interval_s=0.02, lookup_timeout_s=0.01)
    with Pool(config, data=data) as a, Pool(config, data=data) as b:
        tickets: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
        published: dict[int, Counter[object]] = {0: Counter(), 1: Counter()}
        events: dict[int, list[object]] = {0: [], 1: []}
        for _ in range(400):
            index = rng.randrange(2)
            pool = (a, b)[index]
            owner = session(str(rng.randrange(4)))
            numbers = range(rng.randrange(1, 6))
            match rng.randrange(9):
                case 0:
                    pool.publish(owner, *numbers)
                    published[index][owner] += 1
                case 1:
                    tickets[index][pool.spm.recall(owner)] += 1
                case 2:
                    purge = numbered(*numbers)
                    tickets[index][pool.spm.end(owner, purge_chunks=purge)] += 1
                case 3:
                    pool.store.write(numbered(*numbers))
                    pool.spm.on_written(numbered(*numbers))
                    pool.spm.track(owner, numbered(*numbers))
                    pool.spm.set_lease(owner, time.monotonic() + rng.random())
                case 4:
                    pool.spm.lookup(numbered(*numbers))
                case 5:
                    pool.store.is_down = rng.random() < 0.5
                    pool.manifests.is_down = rng.random() < 0.5
                case 6 if rng.random() < 0.3:
                    pool.spm.clear("f00d")
                case 7:
                    pool.spm.on_missing(numbered(*numbers))
                case _:
                    time.sleep(rng.random() * 0.003)
            pool.wall += rng.random() - 0.3
            events[index] += pool.spm.take_events()
            pool.spm.check_integrity()

        for index, pool in enumerate((a, b)):
            eventually(lambda pool=pool: not pool.spm.num_open)  # type: ignore[misc]
            events[index] += pool.spm.take_events()
            found = Counter(
                e.ticket for e in events[index] if isinstance(e, Recalled | Ended)
            )
            assert found == tickets[index]
            told = Counter(e.session for e in events[index] if isinstance(e, Published))
            assert told.keys() == published[index].keys()
            assert all(told[name] <= published[index][name] for name in told)


def test_the_loss_of_what_very_many_share_keeps_no_look_up_waiting() -> None:
    shared, other = numbered(*range(300)), numbered(10**6)
    with Pool(PoolingConfig(lookup_timeout_s=5.0)) as pool:
        for n in range(5_000):
            pool.spm.track(session(str(n)), shared)
        pool.spm.lookup(shared)
        longest, num_answers = 0.0, 0
        while num_answers < 300:
            begin = time.monotonic()
            pool.spm.lookup(other)
            num_answers = pool.spm.stats()["store_lookups"]
            longest = max(longest, time.monotonic() - begin)
            time.sleep(0.001)

        assert longest < 0.3
        eventually(lambda: pool.spm.stats()["store_sessions"] == 0)


def test_a_leased_session_s_manifest_is_kept_alive() -> None:
    with Pool(quick(manifest_ttl_s=1.0, keep_alive_interval_s=0.1)) as pool:
        for owner in (S, session("free")):
            pool.publish(owner, 1)
            pool.event()
        pool.spm.set_lease(S, time.monotonic() + 60)
        eventually(lambda: pool.manifests.record(session("free")) is None)
        time.sleep(0.5)
        assert pool.manifests.record(S) is not None
