"""Manifests through the manager's door, which is the only one there is."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import pytest

from sam_connector.core.types import BlockHash, GroupId
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.events import Ended, Published, Recalled
from sam_connector.pooling.manifest import (
    Manifest,
    ManifestContext,
    ManifestLimits,
    encode,
)
from sam_connector.storage.port import MAX_VERSION, WriteOutcome
from tests.pooling.bench import eventually, session
from tests.pooling.pools import (
    GROUP,
    KEYS,
    Pool,
    S,
    block_hash,
    context,
    other_engines,
    stored,
)


def test_a_session_that_is_published_is_found_by_another_engine() -> None:
    with Pool() as here, Pool(data=here.data) as there:
        here.publish(S, 1, 2, lease_s=30.0)
        assert here.event() == Published(S)
        ticket = there.spm.recall(S)
        event = there.event()

    assert isinstance(event, Recalled)
    assert (event.ticket, event.reason) == (ticket, None)
    assert event.manifest is not None
    assert event.manifest.contexts == [context(1, 2)]
    assert event.manifest.block_sizes == {GROUP: 16}
    assert event.manifest.lease_until == 1_030.0
    assert (here.num_wakes, there.num_wakes) == (1, 1)


def test_there_is_no_manifest_of_a_session_nobody_knows() -> None:
    with Pool() as pool:
        ticket = pool.spm.recall(S)

        assert pool.event() == Recalled(ticket)


def test_the_newer_turn_wins_whoever_writes_it() -> None:
    with Pool(wall=1_000.0) as a, Pool(data=a.data, wall=2_000.0) as b:
        b.publish(S, 1, 2, 3)
        assert b.event() == Published(S)
        a.publish(S, 1)
        assert a.event() == Published(S)

        found = stored(a)
        assert found is not None
        assert found.contexts == [context(1, 2, 3)]


def test_a_turn_after_one_that_was_seen_wins_over_a_clock_that_is_ahead() -> None:
    with Pool(wall=1_000.0) as behind, Pool(data=behind.data, wall=9_000.0) as ahead:
        ahead.publish(S, 1)
        ahead.event()
        behind.spm.recall(S)
        behind.event()

        behind.publish(S, 1, 2)
        behind.event()

        found = stored(behind)
        assert found is not None
        assert found.contexts == [context(1, 2)]


def test_a_clock_that_is_behind_costs_one_turn_and_not_all() -> None:
    """Without having read the other's manifest: the refusal is what it learns from."""
    with Pool(wall=1_000.0) as behind, Pool(data=behind.data, wall=9_000.0) as ahead:
        ahead.publish(S, 1)
        ahead.event()

        for turn in ((1, 2), (1, 2, 3)):
            behind.publish(S, *turn)
            behind.event()

        found = stored(behind)
        assert found is not None
        assert found.contexts == [context(1, 2, 3)]


def test_publications_that_wait_become_one_and_the_last_wins() -> None:
    with Pool() as pool:
        pool.manifests.gate.clear()
        for n in range(10):
            pool.publish(S, *range(n + 1))
        pool.open_gates()

        assert pool.event() == Published(S)
        eventually(lambda: pool.spm.num_open == 0)
        assert pool.spm.take_events() == []
        found = stored(pool)
        assert found is not None
        assert found.contexts == [context(*range(10))]
        assert pool.manifests.num_writes <= 2


def test_a_publication_that_fails_is_tried_again() -> None:
    with Pool() as pool:
        pool.manifests.num_failures = 2
        pool.publish(S, 1)

        assert pool.event() == Published(S)
        assert pool.manifests.num_writes == 3
        assert stored(pool) is not None


def test_it_is_not_tried_for_ever() -> None:
    with Pool() as pool:
        pool.manifests.is_down = True
        pool.publish(S, 1)
        event = pool.event()

        assert isinstance(event, Published)
        assert event.reason
        assert pool.manifests.num_writes == PoolingConfig().max_attempts
        assert pool.spm.num_open == 0


def test_what_fails_once_and_is_replaced_is_not_written_after_all() -> None:
    with Pool() as pool:
        pool.manifests.num_failures = 1
        pool.manifests.gate.clear()
        pool.publish(S, 1)
        eventually(lambda: pool.manifests.num_writes == 1)
        pool.publish(S, 1, 2)
        pool.open_gates()

        assert pool.event() == Published(S)
        found = stored(pool)
        assert found is not None
        assert found.contexts == [context(1, 2)]


def test_a_turn_that_comes_while_the_last_is_being_written_is_written_too() -> None:
    with Pool() as pool:
        pool.manifests.gate.clear()
        pool.publish(S, 1)
        eventually(lambda: pool.manifests.num_writes == 1)
        pool.publish(S, 1, 2)
        pool.open_gates()

        assert pool.events(1) == [Published(S)]
        found = stored(pool)
        assert found is not None
        assert found.contexts == [context(1, 2)]


def test_a_manifest_that_is_too_large_is_not_written() -> None:
    config = PoolingConfig(retry_s=0.001, manifest=ManifestLimits(max_bytes=500))
    with Pool(config) as pool:
        pool.publish(S, *range(100))
        event = pool.event()

        assert isinstance(event, Published)
        assert "bytes" in (event.reason or "")
        assert pool.manifests.num_writes == 0


def test_what_cannot_be_coded_is_a_reason_and_not_an_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mixed = ManifestContext({GROUP: [block_hash(1), BlockHash(b"short" * 4)]})
    with Pool() as pool, caplog.at_level(logging.CRITICAL):
        pool.spm.publish(S, [mixed], parent=None, lease_s=1.0)
        event = pool.event()

        assert isinstance(event, Published)
        assert event.reason
        pool.publish(session("next"), 1)
        assert pool.event() == Published(session("next"))


def test_a_store_that_does_not_answer_is_not_a_session_that_is_not_known() -> None:
    with Pool() as pool:
        pool.manifests.is_down = True
        pool.spm.recall(S)
        event = pool.event()

        assert isinstance(event, Recalled)
        assert event.manifest is None
        assert "down" in (event.reason or "")


def _another_sessions() -> bytes:
    other = Manifest(
        session=session("x"), contexts=[context(1)], block_sizes={GROUP: 16}
    )
    return encode(other)


def _unknown_group() -> bytes:
    hashes = [block_hash(1)]
    lie = Manifest(
        session=S,
        contexts=[ManifestContext({GROUP: hashes, GroupId(9): hashes})],
        block_sizes={GROUP: 16},
    )
    return encode(lie)


@pytest.mark.parametrize(
    "lie",
    [
        lambda: b"not a manifest",
        lambda: other_engines(1, version=5)[:-1],
        _another_sessions,
        _unknown_group,
        lambda: other_engines(1, version=4),
    ],
    ids=["bytes", "short", "another session's", "no such group", "another version"],
)
def test_a_manifest_that_lies_is_none(lie: Callable[[], bytes]) -> None:
    with Pool() as pool:
        pool.manifests.put(S, 5, lie())
        ticket = pool.spm.recall(S)
        event = pool.event()

        assert isinstance(event, Recalled)
        assert (event.ticket, event.manifest) == (ticket, None)
        assert "not usable" in (event.reason or "")
        assert pool.spm.stats()["store_manifests_bad"] == 1
        # It is in nobody's way: the next turn replaces it.
        pool.publish(S, 1)
        assert pool.event() == Published(S)
        assert stored(pool) is not None


def test_a_manifest_of_the_end_of_time_stops_nobody() -> None:
    with Pool() as pool:
        pool.manifests.put(S, MAX_VERSION, other_engines(1, version=MAX_VERSION))
        pool.spm.recall(S)
        pool.event()
        pool.publish(S, 1, 2)
        pool.event()
        pool.spm.end(S)
        pool.event()


def test_a_session_that_has_ended_is_not_found_any_more() -> None:
    with Pool() as here, Pool(data=here.data) as there:
        here.publish(S, 1)
        here.event()

        ticket = there.spm.end(S)
        assert there.event() == Ended(ticket, found=True)

        ticket = here.spm.recall(S)
        assert here.event() == Recalled(ticket)


def test_the_end_of_a_session_nobody_knows_finds_none() -> None:
    with Pool() as pool:
        ticket = pool.spm.end(S)

        assert pool.event() == Ended(ticket, found=False)
        assert pool.manifests.record(S) is None


def test_a_late_write_does_not_revive_a_session() -> None:
    """Another engine's turn of before the end, whose write took its time."""
    with Pool(wall=1_000.0) as slow, Pool(data=slow.data, wall=1_001.0) as other:
        other.publish(S, 1)
        other.event()
        slow.manifests.gate.clear()
        slow.publish(S, 1, 2)
        eventually(lambda: slow.manifests.num_writes == 1)
        other.spm.end(S)
        other.event()

        slow.open_gates()
        slow.event()

        assert stored(slow) is None


def test_a_write_that_is_tried_again_does_not_become_newer() -> None:
    """It keeps the version of its turn; or every retry would outlive a tombstone."""
    with Pool(PoolingConfig(retry_s=0.3)) as pool, Pool(data=pool.data) as other:
        pool.manifests.num_failures = 1
        pool.publish(S, 1)
        eventually(lambda: pool.manifests.num_failures == 0)
        other.manifests.put(S, 1_000_500, b"")
        pool.wall = 5_000.0

        assert pool.event() == Published(S)
        assert stored(pool) is None


def test_the_end_takes_what_waits_to_be_published_with_it() -> None:
    with Pool() as pool:
        pool.manifests.num_failures = 1
        pool.manifests.gate.clear()
        pool.publish(S, 1)
        eventually(lambda: pool.manifests.num_writes == 1)
        pool.wall += 1
        ticket = pool.spm.end(S)
        pool.open_gates()

        events = pool.events(2)
        ended = next(event for event in events if isinstance(event, Ended))
        assert ended.ticket == ticket
        assert ended.reason is None
        assert stored(pool) is None


def test_a_turn_after_the_end_is_not_taken_with_it() -> None:
    """The client frees a session and goes on under its name, faster than the store."""
    with Pool() as pool:
        pool.publish(S, 1)
        pool.event()
        pool.manifests.gate.clear()
        pool.spm.recall(session("keeps the thread busy"))
        eventually(lambda: pool.manifests.num_reads == 1)
        pool.spm.end(S)
        pool.publish(S, 7)
        pool.open_gates()

        assert Published(S) in pool.events(3)
        found = stored(pool)
        assert found is not None
        assert found.contexts == [context(7)]


def test_a_turn_after_the_end_wins_also_over_a_clock_that_is_ahead() -> None:
    """The end has to outdo the other's version, and the turn after it the end's."""
    with Pool(wall=1_000.0) as pool:
        pool.manifests.put(S, 9_000_000, other_engines(1, version=9_000_000))
        pool.manifests.gate.clear()
        pool.spm.recall(session("keeps the thread busy"))
        eventually(lambda: pool.manifests.num_reads == 1)
        pool.spm.end(S)
        pool.publish(S, 7)
        pool.open_gates()

        assert Published(S) in pool.events(3)
        found = stored(pool)
        assert found is not None
        assert found.contexts == [context(7)]


def test_an_end_that_the_store_does_not_take_says_so() -> None:
    with Pool() as pool:
        pool.manifests.is_down = True
        ticket = pool.spm.end(S)
        event = pool.event()

        assert isinstance(event, Ended)
        assert event.ticket == ticket
        assert event.reason


def test_an_exception_of_the_store_is_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pool() as pool, caplog.at_level(logging.CRITICAL):
        pool.manifests.fails_with = RuntimeError("out of the blue")
        pool.publish(S, 1)
        recall, end = pool.spm.recall(S), pool.spm.end(S)
        events = pool.events(3)

        assert {type(e) for e in events} == {Published, Recalled, Ended}
        assert all(event.reason for event in events)
        assert {e.ticket for e in events if not isinstance(e, Published)} == {
            recall,
            end,
        }
        pool.manifests.fails_with = None
        pool.publish(S, 1)
        assert pool.event() == Published(S)


def test_too_many_calls_are_refused_with_the_reason() -> None:
    config = dataclasses.replace(PoolingConfig(), max_open=3)
    with Pool(config) as pool:
        pool.manifests.gate.clear()
        for n in range(3):
            pool.spm.recall(session(str(n)))
        ticket = pool.spm.recall(S)
        assert pool.event() == Recalled(
            ticket, None, "3 calls are waiting for the store"
        )
        pool.publish(S, 1)
        event = pool.event()
        assert isinstance(event, Published)
        assert event.reason
        pool.open_gates()

        assert len(pool.events(3)) == 3
        assert pool.spm.num_open == 0


def test_close_tells_everybody_who_waits_exactly_once() -> None:
    with Pool(PoolingConfig(call_timeout_s=0.01)) as pool:
        pool.manifests.gate.clear()
        pool.publish(S, 1)
        eventually(lambda: pool.manifests.num_writes == 1)
        tickets = {pool.spm.recall(S), pool.spm.end(S)}
        pool.publish(session("b"), 1)
        pool.spm.close()
        pool.open_gates()

        events = pool.events(4)
        assert {e.session for e in events if isinstance(e, Published)} == {
            S,
            session("b"),
        }
        assert {e.ticket for e in events if not isinstance(e, Published)} == tickets
        late = pool.spm.recall(S)
        assert pool.event() == Recalled(late, None, "the engine ends")


def test_a_call_that_returns_after_the_end_is_not_told_a_second_time() -> None:
    with Pool(PoolingConfig(call_timeout_s=0.01)) as pool:
        pool.manifests.gate.clear()
        ticket = pool.spm.recall(S)
        eventually(lambda: pool.manifests.num_reads == 1)
        pool.spm.close()
        pool.open_gates()
        eventually(lambda: not pool.spm._calls._thread.is_alive())

        assert pool.spm.take_events() == [Recalled(ticket, None, "the engine ends")]


def test_a_store_without_manifests_has_no_sessions_and_refuses_none() -> None:
    with Pool(has_manifests=False) as pool:
        pool.publish(S, 1)
        assert pool.event() == Published(S)
        ticket = pool.spm.recall(S)
        assert pool.event() == Recalled(ticket)
        ticket = pool.spm.end(S)
        assert pool.event() == Ended(ticket)


def test_tombstones_and_manifests_have_lives_of_their_own() -> None:
    with Pool() as pool:
        pool.publish(S, 1)
        pool.event()
        pool.spm.end(S)
        pool.event()

        assert pool.manifests.put(S, 5, b"late") is WriteOutcome.OUTDATED
        record = pool.manifests.record(S)
        assert record is not None
        assert record.is_tombstone
        assert KEYS.manifest_key(S).session == S
