"""What waits: bounded, by class, fair, done once, cancelled by whom it is for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sam_connector.core.types import SessionKey
from sam_connector.pooling.transfer_queue import (
    AdmissionStatus,
    Priority,
    Transfer,
    TransferQueue,
)

LOAD, PREFETCH, WRITE = Priority.LOAD, Priority.PREFETCH, Priority.WRITE


def transfer(name: str, priority: Priority = WRITE, **more: Any) -> Transfer:
    fields: dict[str, Any] = {
        "priority": priority,
        "tenant": "t",
        "session": SessionKey("t", "s"),
        "chunk": name,
        "num_bytes": 10,
        "payload": name,
    }
    return Transfer(**(fields | more))


def make(**more: Any) -> TransferQueue:
    return TransferQueue(**({"max_entries": 100, "max_bytes": 1_000} | more))


def taken(queue: TransferQueue, max_bytes: int = 1_000) -> str:
    found = "".join(str(t.payload) for t in queue.take(max_bytes))
    queue.check_integrity()
    return found


def test_loads_go_before_prefetches_before_writes() -> None:
    queue = make()
    queue.offer(transfer("w"))
    queue.offer(transfer("p", PREFETCH))
    queue.offer(transfer("l", LOAD))
    assert taken(queue) == "lpw"


def test_in_a_class_tenants_take_turns() -> None:
    queue = make()
    for name in "abcd":
        queue.offer(transfer(name, tenant="greedy"))
    queue.offer(transfer("x", tenant="other"))
    queue.offer(transfer("y", tenant="third"))
    assert taken(queue, 40) == "axyb"
    assert taken(queue) == "cd"


def test_as_much_as_fits_is_taken_and_one_at_least() -> None:
    queue = make()
    for name in "abc":
        queue.offer(transfer(name))
    assert taken(queue, 25) == "ab"
    assert taken(queue, 1) == "c"
    assert taken(queue) == ""


def test_a_full_queue_refuses_and_says_why() -> None:
    queue = make(max_entries=2)
    queue.offer(transfer("a"))
    queue.offer(transfer("b"))
    refused = queue.offer(transfer("c"))
    assert refused.status is AdmissionStatus.REJECTED
    assert refused.reason is not None
    assert "2" in refused.reason
    assert taken(queue) == "ab"


def test_bytes_are_bounded_too() -> None:
    queue = make(max_bytes=25)
    assert queue.offer(transfer("a")).status is AdmissionStatus.QUEUED
    assert queue.offer(transfer("b")).status is AdmissionStatus.QUEUED
    refused = queue.offer(transfer("c"))
    assert refused.reason is not None
    assert "bytes" in refused.reason
    assert queue.stats().num_rejected == 1


def test_a_tenant_may_have_a_quota() -> None:
    queue = make(quota={"t": 15, "u": None}.get)
    queue.offer(transfer("a"))
    assert queue.offer(transfer("b")).status is AdmissionStatus.REJECTED
    assert queue.offer(transfer("c", tenant="u")).status is AdmissionStatus.QUEUED


def test_the_same_is_done_once() -> None:
    queue = make()
    queue.offer(transfer("a", payload="first"))
    joined = queue.offer(transfer("a", payload="second"))
    assert joined.status is AdmissionStatus.JOINED
    assert taken(queue) == "first"
    assert len(queue) == 0


def test_a_request_that_joins_makes_it_urgent() -> None:
    queue = make()
    queue.offer(transfer("a", PREFETCH))
    queue.offer(transfer("b", PREFETCH))
    queue.offer(transfer("b", LOAD, session=None))
    queue.check_integrity()
    assert taken(queue, 10) == "b"
    assert taken(queue) == "a"


def test_an_evict_takes_out_what_is_only_its_own() -> None:
    queue = make()
    other = SessionKey("t", "other")
    queue.offer(transfer("a"))
    queue.offer(transfer("b"))
    queue.offer(transfer("b", session=other))
    queue.offer(transfer("c", session=None))
    queue.offer(transfer("d", session=other))
    cancelled = queue.cancel(SessionKey("t", "s"))
    assert [t.payload for t in cancelled] == ["a"]
    assert taken(queue) == "bcd"


def test_what_was_cancelled_may_be_asked_for_again() -> None:
    queue = make()
    queue.offer(transfer("a"))
    queue.cancel(SessionKey("t", "s"))
    assert queue.offer(transfer("a")).status is AdmissionStatus.QUEUED
    assert taken(queue) == "a"


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.sampled_from("abcdefgh"),
            st.sampled_from(list(Priority)),
            st.sampled_from("tuv"),
        ),
        st.tuples(st.just("take"), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.sampled_from("tuv")),
    ),
    max_size=60,
)


@given(steps)
def test_nothing_is_lost_and_nothing_is_done_twice(steps: list[Any]) -> None:
    queue = make(max_entries=6, max_bytes=55)
    waiting: dict[str, set[SessionKey]] = {}
    for name, *arguments in steps:
        if name == "offer":
            chunk, priority, tenant = arguments
            owner = SessionKey(tenant, "s")
            offered = transfer(chunk, priority, tenant=tenant, session=owner)
            if queue.offer(offered).status is not AdmissionStatus.REJECTED:
                waiting.setdefault(chunk, set()).add(owner)
        elif name == "take":
            for item in queue.take(arguments[0]):
                del waiting[item.payload]
        else:
            owner = SessionKey(arguments[0], "s")
            gone = {c for c, owners in waiting.items() if owners == {owner}}
            assert {t.payload for t in queue.cancel(owner)} == gone
            for chunk in gone:
                del waiting[chunk]
            for owners in waiting.values():
                owners.discard(owner)
        queue.check_integrity()
        assert len(queue) == len(waiting)
    assert {t.payload for t in queue.take(1_000)} == set(waiting)


def test_tenants_turns_are_remembered_between_calls() -> None:
    queue = make()
    for name in "abcd":
        queue.offer(transfer(name, tenant="greedy"))
    for name in "xy":
        queue.offer(transfer(name, tenant="other"))
    assert [taken(queue, 10) for _ in range(5)] == ["a", "x", "b", "y", "c"]


def test_what_does_not_fit_is_not_overtaken() -> None:
    queue = make()
    queue.offer(transfer("a"))
    queue.offer(transfer("b", num_bytes=50))
    queue.offer(transfer("c", num_bytes=1))
    assert taken(queue, 30) == "a"
    assert taken(queue, 30) == "b"


def test_the_same_may_be_joined_when_there_is_room_for_nothing_else() -> None:
    queue = make(max_entries=1)
    queue.offer(transfer("a"))
    assert queue.offer(transfer("a")).status is AdmissionStatus.JOINED


def test_payloads_may_be_merged() -> None:
    queue = make(merge=lambda known, new: known + new)
    queue.offer(transfer("a", payload="first "))
    queue.offer(transfer("a", payload="second"))
    assert taken(queue) == "first second"


def test_a_value_larger_than_the_queue_may_wait_alone() -> None:
    """Or it could never be moved at all."""
    queue = make(max_bytes=25)
    large = transfer("a", num_bytes=1_000)
    assert queue.offer(large).status is AdmissionStatus.QUEUED
    assert queue.offer(transfer("b")).status is AdmissionStatus.REJECTED
    assert taken(queue) == "a"


def test_a_thousand_offers_that_are_cancelled_leave_nothing() -> None:
    queue = make()
    for index in range(1_000):
        queue.offer(transfer(str(index), PREFETCH))
        queue.offer(transfer(str(index), LOAD))
        queue.cancel(SessionKey("t", "s"))
    queue.check_integrity()
    assert queue.stats().num_bytes == len(queue) == 0
    assert not any(queue._lanes.values())
    assert not queue._by_session
    assert not queue._tenant_bytes
