"""Edits: targets, ranges, tiers, and operations that end later."""

from __future__ import annotations

import pytest

from sam_connector.core.tiers import OperationHandle, TierEvent, TierEventType
from sam_connector.core.types import BlockCounts, Edit, EditStatus, EditType
from tests.core.builders import (
    EVICT,
    OFFLOAD,
    PREFETCH,
    Engine,
    FakeTier,
    evict_range,
    key,
)


def ranged(**kwargs: object) -> Engine:
    engine = Engine(ranges=True, **kwargs)  # type: ignore[arg-type]
    engine.turn("s", "abcdef", ttl=60)
    return engine


def offload_range(start: int, end: int) -> Edit:
    return Edit(type=EditType.OFFLOAD, block_start=start, block_end=end)


# --- ranges -----------------------------------------------------------------


def test_a_range_is_half_open() -> None:
    engine = ranged()
    (result,) = engine.edit("s", evict_range(2, 4))
    assert result.status is EditStatus.COMPLETED
    assert result.blocks == BlockCounts(requested=2, done=2)
    assert engine.ref_cnts("abcdef") == [1, 1, 0, 0, 1, 1]
    assert engine.pool.free_contents().startswith("dc")
    engine.check_integrity()


@pytest.mark.parametrize(
    ("start", "end"), [(0, 7), (6, 7), (3, 3), (4, 2), (-1, 2), (2, None), (99, 100)]
)
def test_a_range_that_is_none_or_beyond_the_context_is_rejected(
    start: int, end: int | None
) -> None:
    engine = ranged()
    (result,) = engine.edit("s", evict_range(start, end))
    assert result.status is EditStatus.REJECTED
    assert result.reason
    assert engine.ref_cnts("abcdef") == [1] * 6


def test_half_a_range_is_never_taken_for_a_whole_context() -> None:
    engine = ranged()
    (result,) = engine.edit("s", evict_range(None, 3))
    assert result.status is EditStatus.REJECTED
    assert engine.ref_cnts("abcdef") == [1] * 6


def test_ranges_have_their_own_switch() -> None:
    engine = Engine()
    engine.turn("s", "abcdef", ttl=60, protect=2)
    (result,) = engine.edit("s", evict_range(0, 2))
    assert result.status is EditStatus.UNSUPPORTED
    assert engine.holds("abcdef") == [(1, 1060.0)] * 6


def test_a_range_is_about_the_context_used_last() -> None:
    engine = ranged()
    engine.turn("s", "xy")
    (result,) = engine.edit("s", evict_range(0, 6))
    assert result.status is EditStatus.REJECTED
    engine.turn("s", "abcdef")
    (result,) = engine.edit("s", evict_range(0, 6))
    assert result.status is EditStatus.COMPLETED
    assert engine.ref_cnts("xy") == [1, 1]


def test_a_range_of_a_session_without_contexts_is_rejected() -> None:
    engine = Engine(ranges=True)
    request_id = engine.add("s")
    (result,) = engine.edit("s", evict_range(0, 1))
    assert result.status is EditStatus.REJECTED
    engine.finish(request_id)


def test_a_context_is_remembered_after_its_tail_was_given_up() -> None:
    engine = ranged()
    engine.edit("s", evict_range(3, 6))
    assert engine.texts("s") == ["abcdef"]
    engine.check_integrity()
    engine.turn("s", "abcdef", generated="g", ttl=60)
    assert engine.holds("abcdefg") == [(1, 1060.0)] * 7
    engine.check_integrity()


def test_what_one_session_remembers_is_not_mixed_with_what_another_appends() -> None:
    engine = Engine(ranges=True)
    engine.turn("b", "abc")
    engine.turn("b", "abc", generated="xyz")
    engine.turn("a", "abc")
    engine.edit("b", evict_range(0, 6))
    engine.turn("a", "abc", generated="qrs")
    assert engine.texts("b") == ["abcxyz"]
    assert engine.texts("a") == ["abcqrs"]
    engine.check_integrity()


def test_a_range_given_up_is_no_business_of_a_later_lease() -> None:
    engine = ranged()
    engine.edit("s", evict_range(0, 6))
    engine.turn("u", "abcdef", ttl=60)
    engine.manager.set_lease(key("s"), 300, engine.now)
    engine.edit("s", evict_range(1, 3))
    assert engine.holds("abcdef") == [(1, 1060.0)] * 6
    engine.check_integrity()


# --- protect_blocks ---------------------------------------------------------


def protected(engine: Engine, text: str) -> str:
    """Which blocks of ``text`` are under a deadline."""
    holds = zip(text, engine.holds(text), strict=True)
    return "".join(letter for letter, (_, deadline) in holds if deadline)


def test_protect_blocks_leases_a_prefix_and_holds_the_rest() -> None:
    engine = Engine(ranges=True)
    engine.turn("s", "abcdef", ttl=60, protect=2)
    assert protected(engine, "abcdef") == "ab"
    assert engine.ref_cnts("abcdef") == [1] * 6
    assert engine.pool.zone_contents()[1:] == ("fedc", "ba")


def test_a_context_that_grows_past_protect_blocks_is_covered_up_to_it() -> None:
    engine = Engine(ranges=True)
    engine.turn("s", "ab", ttl=60, protect=4)
    engine.start("s", "abcdef")
    assert protected(engine, "abcdef") == "abcd"


def test_protect_blocks_splits_what_another_session_holds() -> None:
    engine = Engine(ranges=True)
    engine.turn("u", "abcdef")
    engine.turn("s", "ab", ttl=60, protect=4)
    engine.turn("s", "abcdef")
    assert protected(engine, "abcdef") == "abcd"
    engine.check_integrity()


def test_protect_blocks_zero_protects_nothing() -> None:
    engine = Engine(ranges=True)
    engine.turn("s", "abc", ttl=60, protect=0)
    assert protected(engine, "abc") == ""
    assert engine.deadlines("s") == {"abc": 60.0}


def test_protect_blocks_has_no_effect_with_ranges_off() -> None:
    engine = Engine()
    engine.turn("s", "abcdef", ttl=60, protect=2)
    assert protected(engine, "abcdef") == "abcdef"


# --- tiers ------------------------------------------------------------------


def test_a_tier_hears_what_a_completed_requests_context_is() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "ab", generated="c")
    assert tier.calls == [("register_cache", key("s"), ["abc"])]


def test_a_tier_is_not_told_of_a_context_that_ended_with_the_request() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "ab", edits=[EVICT])
    assert tier.calls == []


def test_an_offload_gives_up_local_retention_only_once_it_is_completed() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    (result,) = engine.edit("s", OFFLOAD)
    assert result.status is EditStatus.ACCEPTED
    assert result.operation_id is not None
    assert engine.pool.zone_contents()[2] == "cba"
    tier.finish(result.operation_id, EditStatus.COMPLETED)
    assert engine.pool.zone_contents()[2] == "cba"
    engine.step()
    assert engine.pool.zone_contents() == ("cba" + "_" * 61, "", "")
    known = engine.manager.edits.operations.get(result.operation_id)
    assert known is not None
    assert known[1].status is EditStatus.COMPLETED
    # What the context is stays known: it may come back.
    assert engine.texts("s") == ["abc"]
    engine.check_integrity()
    (result,) = engine.edit("s", EVICT)
    engine.assert_nothing_left()


def test_an_offload_that_is_done_at_once_gives_up_local_retention_at_once() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    tier.answer = OperationHandle(
        status=EditStatus.COMPLETED, num_bytes=99, is_safe=True
    )
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    (result,) = engine.edit("s", OFFLOAD)
    assert (result.status, result.num_bytes) == (EditStatus.COMPLETED, 99)
    assert engine.ref_cnts("abc") == [0, 0, 0]
    assert result.blocks.reclaimed == 3


@pytest.mark.parametrize(
    "status", [EditStatus.PARTIAL, EditStatus.REJECTED, EditStatus.NOT_FOUND]
)
def test_an_offload_that_fails_gives_up_nothing(status: EditStatus) -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD)
    tier.finish(tier.operation_ids[0], status)
    engine.step()
    assert engine.pool.zone_contents()[2] == "cba"
    tier.answer = OperationHandle(status=status)
    engine.edit("s", OFFLOAD)
    assert engine.pool.zone_contents()[2] == "cba"


@pytest.mark.parametrize(
    ("is_safe", "held", "reclaimed"), [(True, [0, 0, 0], 3), (False, [1, 1, 1], 0)]
)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_part_is_given_up_if_it_is_all_that_the_engine_has(
    is_safe: bool, at_once: bool, held: list[int], reclaimed: int
) -> None:
    """PARTIAL may mean that the rest was in no cache any more."""
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    partial = OperationHandle(status=EditStatus.PARTIAL, is_safe=is_safe)
    if at_once:
        tier.answer = partial
    (result,) = engine.edit("s", OFFLOAD)
    if not at_once:
        operation_id = tier.operation_ids[0]
        tier.events.append(
            TierEvent(
                type=TierEventType.OPERATION, operation_id=operation_id, handle=partial
            )
        )
        engine.step()
        known = engine.manager.edits.operations.get(operation_id)
        assert known is not None
        result = known[1]
    assert (result.status, result.blocks.reclaimed) == (EditStatus.PARTIAL, reclaimed)
    assert engine.ref_cnts("abc") == held
    engine.check_integrity()


def test_reclaimed_is_what_nobody_holds_any_more() -> None:
    """What another session has of it stays, and so does what the engine lost."""
    tier = FakeTier(EditType.OFFLOAD)
    tier.answer = OperationHandle(
        status=EditStatus.COMPLETED, blocks=BlockCounts(requested=5, done=5)
    )
    engine = Engine(num_blocks=9, tiers=[tier])
    engine.turn("s", "abcde")
    engine.turn("u", "ab")
    engine.pool.free_blocks(engine.fill(4))  # takes the last block of ``s``
    (result,) = engine.edit("s", OFFLOAD)
    assert result.blocks == BlockCounts(requested=5, done=5, reclaimed=2)
    assert engine.ref_cnts("abcde") == [1, 1, 0, 0, 0]


def test_what_is_in_use_is_reclaimed_by_nobody() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    tier.answer = OperationHandle(status=EditStatus.COMPLETED)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    running = engine.start("s", "abc")
    (result,) = engine.edit("s", OFFLOAD)
    assert result.blocks.reclaimed == 0
    engine.finish(running)


def test_an_offload_of_a_range_gives_up_that_range() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = ranged(tiers=[tier])
    engine.edit("s", offload_range(2, 4))
    assert tier.calls[-1] == ("offload", key("s"), ["cd"])
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    engine.step()
    assert engine.ref_cnts("abcdef") == [1, 1, 0, 0, 1, 1]


def test_what_came_after_an_offload_began_is_not_given_up() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD)
    engine.turn("s", "abc", generated="de", ttl=60)
    engine.turn("s", "xyz", ttl=60)
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    engine.step()
    assert engine.ref_cnts("abcde") == [0, 0, 0, 1, 1]
    assert engine.ref_cnts("xyz") == [1, 1, 1]


def test_a_context_in_use_again_is_not_given_up() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD)
    running = engine.start("s", "abc")
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    engine.step()
    assert engine.ref_cnts("abc") == [1, 1, 1]
    engine.finish(running)


def test_an_operation_ends_once() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD)
    tier.finish(tier.operation_ids[0], EditStatus.REJECTED)
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    tier.finish("op-unheard-of", EditStatus.COMPLETED)
    engine.step()
    assert engine.ref_cnts("abc") == [1, 1, 1]
    assert engine.manager.stats().edits == {
        "offload/accepted": 1,
        "offload/rejected": 1,
    }


def test_an_open_operation_keeps_the_manager_from_being_idle() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD)
    engine.manager.free_session(key("s"))
    assert engine.manager.stats().timers == 0
    assert not engine.manager.is_idle
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    assert not engine.manager.is_idle  # its end is yet to be heard of
    engine.step()
    assert engine.manager.is_idle
    engine.assert_nothing_left()


@pytest.mark.parametrize(
    "status", [s for s in EditStatus if s is not EditStatus.ACCEPTED]
)
def test_an_operation_that_ended_at_once_keeps_nothing_busy(
    status: EditStatus,
) -> None:
    tier = FakeTier(EditType.OFFLOAD)
    tier.answer = OperationHandle(status=status)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD)
    engine.manager.free_session(key("s"))
    assert engine.manager.is_idle


def test_the_end_of_an_operation_of_a_forgotten_session_changes_nothing() -> None:
    tier = FakeTier(EditType.OFFLOAD, EditType.EVICT)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD, EVICT)
    engine.turn("s", "abc", ttl=60)
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    engine.step()
    assert engine.holds("abc") == [(1, 1060.0)] * 3


def test_a_prefetch_changes_nothing_here() -> None:
    tier = FakeTier(EditType.PREFETCH)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    (result,) = engine.edit("s", PREFETCH)
    assert result.status is EditStatus.ACCEPTED
    tier.finish(tier.operation_ids[0], EditStatus.COMPLETED)
    engine.step()
    assert engine.holds("abc") == [(1, 1060.0)] * 3


def test_the_first_capable_tier_gets_an_operation_and_all_hear_an_evict() -> None:
    tiers = [
        FakeTier(EditType.EVICT),
        FakeTier(EditType.OFFLOAD, EditType.EVICT),
        FakeTier(EditType.OFFLOAD),
    ]
    engine = Engine(tiers=list(tiers))
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", OFFLOAD, EVICT)
    assert [[call[0] for call in tier.calls[1:]] for tier in tiers] == [
        ["evict"],
        ["offload", "evict"],
        [],
    ]


def test_edits_are_carried_out_in_order_with_one_result_each() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    statuses = [result.status for result in engine.edit("s", OFFLOAD, EVICT, EVICT)]
    assert statuses == [
        EditStatus.UNSUPPORTED,
        EditStatus.COMPLETED,
        EditStatus.NOT_FOUND,
    ]


def test_an_evict_says_what_was_missing() -> None:
    engine = Engine(num_blocks=7)
    engine.turn("s", "abcd")
    engine.pool.free_blocks(engine.fill(4))
    (result,) = engine.edit("s", EVICT)
    assert result.blocks == BlockCounts(requested=4, done=2, missing=2)
