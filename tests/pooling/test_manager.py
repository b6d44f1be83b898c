"""The pooling manager with its threads, on a store that holds, fails and lies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from sam_backends.memory import MemoryData
from sam_connector.pooling.events import Ended, Published, Recalled
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, ManifestRecord, WriteOutcome
from tests.pooling.bench import (
    Bench,
    chunk,
    chunks,
    eventually,
    key_space,
    session,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()
    made.spm.check_integrity()
    assert made.spm.num_open == 0


# --- look-ups ---------------------------------------------------------------------


def test_a_look_up_is_answered_in_the_background(bench: Bench) -> None:
    bench.put("ab")
    assert bench.lookup("abc") == [None, None, None]
    assert bench.found("abc") == [True, True, False]


def test_a_chunk_that_one_rank_lacks_is_missing(bench: Bench) -> None:
    bench.put("a")
    [_, second] = key_space().keys(chunks("a")[0])
    bench.store.delete([second], deadline=time.monotonic() + 5)
    assert bench.found("a") == [False]


def test_a_store_that_hangs_keeps_nobody_for_longer_than_the_deadline() -> None:
    bench = Bench(lookup_timeout_s=0.05)
    bench.put("a")
    bench.store.gate.clear()
    assert bench.lookup("a") == [None]
    eventually(lambda: bench.lookup("a") == [False])
    bench.store.gate.set()
    eventually(lambda: bench.lookup("a") == [True])
    bench.close()


def test_a_store_that_is_far_away_is_not_one_that_is_down() -> None:
    """Requests wait for as long as they may; the call has the time of any other."""
    bench = Bench(lookup_timeout_s=0.01, call_timeout_s=0.5)
    seen: list[float] = []
    exists = bench.store.exists

    def noted(keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        seen.append(deadline - time.monotonic())
        return exists(keys, deadline=deadline)

    bench.store.exists = noted  # type: ignore[method-assign]
    bench.lookup("a")
    eventually(lambda: bool(seen))
    assert seen[0] > 0.1
    bench.close()


def test_a_call_asks_for_so_many_values_whatever_the_ranks() -> None:
    bench = Bench(max_batch=8)
    wanted = [chunk(chr(ord("a") + i)) for i in range(10)]
    bench.store.gate.clear()
    bench.spm.lookup(wanted)
    bench.store.gate.set()
    eventually(lambda: None not in bench.spm.lookup(wanted))
    assert max(len(keys) for _, keys in bench.store.asked) <= 8
    bench.close()


def test_a_reset_while_a_question_is_out(bench: Bench) -> None:
    bench.put("a")
    bench.store.gate.clear()
    bench.lookup("a")
    eventually(lambda: bool(bench.store.asked))
    bench.spm.clear("cd" * 16)
    bench.store.gate.set()
    assert bench.found("a") == [False]  # under the new name there is nothing


def test_d03_a_backend_that_raises_does_not_end_look_ups(bench: Bench) -> None:
    bench.put("a")
    bench.store.raises = True
    bench.lookup("a")
    eventually(lambda: bool(bench.store.asked))
    bench.store.raises = False
    assert bench.lookup("b") == [None]
    assert bench.found("b") == [False]


def test_what_was_written_or_missed_is_known_at_once(bench: Bench) -> None:
    bench.spm.on_written(chunks("a"))
    assert bench.lookup("a") == [True]
    assert bench.spm.is_known(chunks("a")[0])
    bench.spm.on_unreadable(chunks("a"))
    assert bench.lookup("a") == [False]


def test_d06_what_is_missing_is_no_session_s_any_more(bench: Bench) -> None:
    bench.spm.track(session("s"), chunks("ab"))
    bench.spm.on_missing(chunks("a"))
    assert bench.spm.num_chunks_of(session("s")) == 1


# --- keep-alive -------------------------------------------------------------------


def test_leased_values_are_kept_alive_with_no_step_of_an_engine() -> None:
    bench = Bench(keep_alive_interval_s=0.1, ttl_s=30.0)
    bench.put("ab")
    bench.spm.track(session("s"), chunks("ab"))
    bench.spm.track(session("u"), chunks("c"))
    bench.spm.set_lease(session("s"), time.monotonic() + 60)

    def touched() -> int:
        return sum(name == "touch" for name, _ in bench.store.asked)

    eventually(lambda: touched() >= 3)
    names = {key for name, keys in bench.store.asked if name == "touch" for key in keys}
    assert names == {key for c in chunks("ab") for key in key_space().keys(c)}
    bench.spm.set_lease(session("s"), 0.0)
    time.sleep(0.3)
    before = touched()
    time.sleep(0.3)
    assert touched() == before
    bench.close()


def test_d06_keep_alive_notices_a_store_that_was_emptied() -> None:
    bench = Bench(keep_alive_interval_s=0.1)
    bench.put("a")
    bench.spm.track(session("s"), chunks("ab"))
    bench.spm.set_lease(session("s"), time.monotonic() + 60)
    eventually(lambda: bench.spm.num_chunks_of(session("s")) == 1)
    assert bench.lookup("b") == [False]
    bench.close()


# --- manifests --------------------------------------------------------------------


def test_a_manifest_is_found_by_another_instance(bench: Bench) -> None:
    bench.publish("s", "abc", parent=session("lead"), lease_s=60.0)
    assert bench.event() == Published(session("s"))
    other = Bench(bench.data)
    ticket = other.spm.recall(session("s"))
    event = other.event()
    assert isinstance(event, Recalled)
    assert event.ticket == ticket
    assert event.manifest is not None
    assert event.manifest.parent == session("lead")
    assert event.manifest.num_tokens == 48
    assert event.manifest.lease_until == pytest.approx(bench.wall + 60.0)
    assert other.wakes == 1
    other.close()


def test_there_is_no_manifest_of_an_unknown_session(bench: Bench) -> None:
    ticket = bench.spm.recall(session("nobody"))
    assert bench.event() == Recalled(ticket, None, None)


def test_several_turns_are_written_once_and_the_last_one_wins(bench: Bench) -> None:
    for text in ("a", "ab", "abc"):
        bench.publish("s", text)
    assert bench.event() == Published(session("s"))
    bench.spm.recall(session("s"))
    event = bench.event()
    assert isinstance(event, Recalled)
    assert event.manifest is not None
    assert event.manifest.num_tokens == 48


def test_the_newer_turn_wins_whoever_writes_it(bench: Bench) -> None:
    other = Bench(bench.data)
    other.wall = bench.wall + 10
    other.publish("s", "abcd")
    other.event()
    bench.publish("s", "ab")  # an older turn, that comes late
    assert bench.event() == Published(session("s"))
    bench.spm.recall(session("s"))
    event = bench.event()
    assert isinstance(event, Recalled)
    assert event.manifest is not None
    assert event.manifest.num_tokens == 64
    other.close()


def test_who_has_read_a_newer_turn_s_manifest_writes_after_it(bench: Bench) -> None:
    other = Bench(bench.data)
    other.wall = bench.wall + 10
    other.publish("s", "abcd")
    other.event()
    bench.spm.recall(session("s"))
    bench.event()
    bench.publish("s", "abcde")  # though its clock is behind
    bench.event()
    other.spm.recall(session("s"))
    event = other.event()
    assert isinstance(event, Recalled)
    assert event.manifest is not None
    assert event.manifest.num_tokens == 80
    other.close()


def test_a_late_write_does_not_revive_a_session_that_has_ended(bench: Bench) -> None:
    bench.publish("s", "abc")
    bench.event()
    late = Bench(bench.data)
    bench.wall += 5
    ticket = bench.spm.end(session("s"))
    assert bench.event() == Ended(ticket, True)
    late.publish("s", "ab")
    late.event()
    bench.spm.recall(session("s"))
    assert bench.event() == Recalled(ticket + 1, None, None)
    late.wall += 10
    late.publish("s", "abcd")  # a newer turn does
    late.event()
    bench.spm.recall(session("s"))
    event = bench.event()
    assert isinstance(event, Recalled)
    assert event.manifest is not None
    late.close()


def test_the_end_of_a_session_that_nobody_knows(bench: Bench) -> None:
    ticket = bench.spm.end(session("nobody"))
    assert bench.event() == Ended(ticket, False)


def test_an_end_stops_keep_alive_and_deletes_what_it_is_told_to(bench: Bench) -> None:
    bench.put("ab")
    bench.spm.track(session("s"), chunks("ab"))
    bench.spm.set_lease(session("s"), time.monotonic() + 60)
    bench.spm.end(session("s"), purge_chunks=chunks("b"))
    bench.event()
    assert bench.spm.stats()["store_leases"] == 0
    assert bench.spm.num_chunks_of(session("s")) == 0
    assert bench.found("ab") == [True, False]


def test_a_manifest_that_lies_is_told_from_none(bench: Bench) -> None:
    key = key_space().manifest_key(session("s"))
    record = ManifestRecord(1, b"not a manifest")
    written = bench.manifests.write(
        key, record, ttl_s=60, deadline=time.monotonic() + 5
    )
    assert written is WriteOutcome.DONE
    bench.spm.recall(session("s"))
    event = bench.event()
    assert isinstance(event, Recalled)
    assert event.manifest is None
    assert event.reason is not None
    assert "not usable" in event.reason


def test_a_manifest_is_tried_again_and_given_up(bench: Bench) -> None:
    bench.manifests.close()
    bench.publish("s", "a")
    event = bench.event()
    assert isinstance(event, Published)
    assert event.reason == "no answer"


def test_so_many_calls_wait_and_more_are_refused() -> None:
    bench = Bench(max_open=2)
    bench.manifests.read = (  # type: ignore[method-assign]
        lambda *args, real=bench.manifests.read, **more: (  # type: ignore[misc]
            bench.store.gate.wait(10),
            real(*args, **more),
        )[1]
    )
    bench.store.gate.clear()
    tickets = [bench.spm.recall(session(name)) for name in "abc"]
    event = bench.event()
    assert isinstance(event, Recalled)
    assert event.ticket == tickets[2]
    assert event.reason is not None
    assert "2 calls" in event.reason
    bench.store.gate.set()
    eventually(lambda: bench.spm.num_open == 0)
    assert len(bench.spm.take_events()) == 2
    bench.close()


def test_whoever_waits_at_the_end_is_told() -> None:
    bench = Bench()
    bench.manifests.read = (  # type: ignore[method-assign]
        lambda *args, **more: bench.store.gate.wait(0.5)
    )
    bench.store.gate.clear()
    for name in "ab":
        bench.spm.recall(session(name))
    bench.close()
    events = bench.spm.take_events()
    assert len(events) == 2
    assert all(isinstance(event, Recalled) and event.reason for event in events)
    ticket = bench.spm.recall(session("late"))
    assert bench.spm.take_events() == [Recalled(ticket, None, "the engine ends")]


def test_after_a_reset_nothing_is_tracked() -> None:
    bench = Bench(MemoryData())
    bench.spm.track(session("s"), chunks("ab"))
    bench.spm.set_lease(session("s"), time.monotonic() + 60)
    bench.spm.on_written(chunks("ab"))
    bench.spm.clear("cd" * 16)
    stats = bench.spm.stats()
    assert stats["store_sessions"] == stats["store_leases"] == 0
    assert bench.lookup("a") == [None]
    bench.close()
