"""The ends of copies, what is told of them, and what is left when all goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.config import SavePolicy
from sam_connector.connector.metadata import RankResult
from sam_connector.connector.tier import host_tier, open_operations
from sam_connector.core.tiers import TierEventType
from sam_connector.core.types import EditStatus, EditType
from sam_connector.errors import IntegrityError
from sam_connector.transfer.contract import Direction
from tests.connector.tier.bench import BLOCK_BYTES, Bench, request
from tests.core.builders import key
from tests.core.slots import blocks_of, contents

pytestmark = pytest.mark.vllm


def events(bench: Bench) -> list[tuple[str, int, int]]:
    return [
        (event.type.name, event.num_blocks, event.num_bytes)
        for event in bench.tier.take_session_events()
        if event.type is not TierEventType.OPERATION
    ]


# --- all ranks --------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 2])
def test_content_is_there_once_every_rank_has_it(last: int) -> None:
    bench = Bench(num_ranks=3)
    bench.cache("abc")
    bench.put("xyz")
    bench.offload("abc")
    bench.prefetch("xyz", session="t")
    bench.step()
    bench.report(ranks={0, 1, 2} - {last})
    assert bench.in_tier("abc") == bench.in_gpu("xyz") == ""
    assert bench.state.gpu.num_pins == 6
    bench.report(ranks=[last])
    assert bench.in_tier("abc") + bench.in_gpu("xyz") == "abcxyz"
    bench.check_idle()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_fails_fails_all(failing: int) -> None:
    bench = Bench(num_ranks=2)
    bench.cache("abc")
    bench.put("xyz")
    bench.offload("abc")
    bench.prefetch("xyz", session="t")
    bench.step()
    jobs = bench.jobs
    bench.report(*jobs, ranks=[failing], error="no")
    # The other rank still reads and writes.
    assert bench.state.gpu.num_pins == bench.state.slots.num_pinned == 6
    bench.report(*jobs, ranks=[1 - failing])
    assert bench.in_tier("abcd") + bench.in_gpu("xyz") == ""
    assert {h.status for h in bench.ended().values()} == {EditStatus.REJECTED}
    assert bench.tier.stats()["failed_copies"] == 2
    bench.check_idle()


def test_a_report_that_comes_twice_or_too_late_changes_nothing() -> None:
    bench = Bench(num_ranks=2)
    bench.cache("abc")
    bench.offload("abc")
    bench.step()
    (job,) = bench.jobs
    bench.report(job, ranks=[0])
    bench.report(job, ranks=[0])
    assert bench.in_tier("abc") == ""
    bench.report(job, ranks=[1])
    bench.report(job, ranks=[1], error="no")
    assert bench.in_tier("abc") == "abc"
    assert bench.tier.stats()["late_reports"] == 2
    bench.check_idle()


# --- resets -----------------------------------------------------------------


def test_what_was_stored_before_a_reset_is_not_published_after_it() -> None:
    bench = Bench(policy=SavePolicy.ALL)
    bench.finish(request("abc"))
    bench.step()
    bench.tier.reset()
    bench.report()
    assert bench.in_tier("abc") == ""
    bench.check_idle()


def test_a_reset_forgets_content_and_who_holds_it_but_not_what_is_held() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.put("xyz")
    bench.state.contexts.keep(key("s"), blocks_of("xyz", 1, deadline=9.0))
    bench.prefetch("xyz")
    bench.step()
    bench.tier.reset()
    bench.check()
    assert bench.in_tier("xyz") == ""
    assert len(bench.state.contexts) == 0
    assert bench.state.slots.num_pinned == bench.state.gpu.num_pins == 3
    bench.report()
    bench.check_idle()
    assert bench.state.slots.num_available(99) == 16


def test_content_of_after_a_reset_survives_a_load_of_before_that_fails() -> None:
    """It only may cost a hit; it must not cost a pin."""
    bench = Bench()
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    bench.tier.reset()
    bench.put("abc")
    bench.report(error="no")
    bench.check_idle()


# --- events and pending work ------------------------------------------------


def test_bytes_are_told_of_in_one_event_a_kind() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.cache("de")
    bench.put("xyz")
    bench.offload("abc")
    bench.offload("de", session="t")
    bench.prefetch("xyz", session="u")
    bench.step()
    bench.report()
    assert events(bench) == [
        ("LOAD", 3, 3 * BLOCK_BYTES),
        ("SAVE", 5, 5 * BLOCK_BYTES),
    ]
    assert events(bench) == []


def test_a_copy_that_failed_has_moved_nothing() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.put("xyz")
    bench.offload("abc")
    bench.prefetch("xyz", session="t")
    bench.step()
    bench.report(error="no")
    assert events(bench) == []


def test_steps_go_on_until_everything_is_done_and_heard_of() -> None:
    bench = Bench()
    assert not bench.tier.has_pending_work
    bench.cache("abc")
    bench.offload("abc")
    assert bench.tier.has_pending_work  # not begun yet
    bench.step()
    assert bench.tier.has_pending_work
    bench.report()
    assert bench.tier.has_pending_work  # not heard of yet
    assert bench.tier.has_events
    bench.ended()
    assert not bench.tier.has_pending_work
    assert not bench.tier.has_events


def test_steps_go_on_while_saves_are_queued() -> None:
    bench = Bench(policy=SavePolicy.ALL, budget=1)
    bench.finish(request("abc"))
    bench.step()
    bench.report()
    events(bench)
    assert bench.tier.has_pending_work
    bench.run()
    events(bench)
    assert not bench.tier.has_pending_work


def test_where_nobody_listens_nothing_is_told() -> None:
    """Else there would be something to hear for ever."""
    bench = Bench()
    bench.tier.has_listener = False
    bench.cache("abc")
    bench.offload("abc")
    bench.run()
    assert not bench.tier.has_events
    assert not bench.tier.has_pending_work


def test_blocks_will_be_given_back_while_copies_hold_some() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.offload("abc")
    assert not bench.tier.has_pinned_blocks
    bench.step()
    assert bench.tier.has_pinned_blocks
    bench.report()
    assert not bench.tier.has_pinned_blocks


# --- what the manager says --------------------------------------------------


def test_it_can_do_all_edits() -> None:
    assert Bench().tier.session_capabilities == frozenset(EditType)


def test_more_operations_than_that_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_operations, "_MAX_OPERATIONS", 2)
    bench = Bench()
    bench.cache("abc")
    assert bench.offload("abc").status is EditStatus.ACCEPTED
    assert bench.prefetch("abc").status is EditStatus.ACCEPTED
    refused = bench.offload("ab")
    assert refused.status is EditStatus.REJECTED
    assert refused.reason == "2 operations are under way"
    bench.run()
    assert sorted(bench.ended()) == ["op-1", "op-2"]
    assert bench.offload("abc").status is EditStatus.ACCEPTED


def test_an_operation_asked_for_twice_is_done_once_and_answered_twice() -> None:
    bench = Bench()
    bench.cache("abc")
    first, second = bench.offload("abc"), bench.offload("abc")
    assert first.blocks.requested == second.blocks.requested == 3
    bench.run()
    ended = bench.ended()
    assert sorted(ended) == ["op-1", "op-2"]
    assert ended["op-1"] == ended["op-2"]
    assert ended["op-1"].blocks.done == 3


def test_one_step_looks_at_so_many_blocks_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that need no copy use up no budget, but time."""
    monkeypatch.setattr(host_tier, "_MAX_LOOKS", 2)
    bench = Bench()
    bench.put("abcde")
    bench.cache("abcde")
    bench.offload("abcde")
    bench.prefetch("abcde")
    ended = []
    for _ in range(6):
        bench.step()
        ended.append(sorted(bench.ended()))
    # The prefetch first, two blocks a step, then the offload.
    assert ended == [[], [], ["op-2"], [], ["op-1"], []]


def test_an_evict_of_a_range_is_not_undone_by_an_offload_under_way() -> None:
    bench = Bench()
    bench.cache("abcdef")
    bench.offload("abcdef")
    bench.step()
    part = blocks_of("abcdef")
    ranged = type(part)(
        block_hashes={0: part.block_hashes[0][2:4]},  # type: ignore[index, dict-item]
        block_start=2,
        is_whole=False,
        context_id=1,
    )
    bench.tier.evict("op", key("s"), [ranged], purge=False)
    bench.run()
    assert bench.state.contexts.num_held(key("s")) == 0


def test_an_evict_makes_the_sessions_content_the_next_to_go() -> None:
    bench = Bench(num_slots=6)
    bench.put("xyz")
    bench.put("abc")
    bench.state.contexts.keep(key("s"), blocks_of("abc", 1, deadline=9.0))
    bench.evict("abc")
    assert bench.state.contexts.num_held(key("s")) == 0
    bench.state.slots.allocate(3)
    assert bench.in_tier("abc") + bench.in_tier("xyz") == "xyz"


def test_an_evict_of_a_range_leaves_the_rest_and_what_is_under_way() -> None:
    bench = Bench()
    bench.put("abcdef")
    bench.state.contexts.keep(key("s"), blocks_of("abcdef", 1))
    bench.prefetch("abcdef")
    bench.step()
    part = blocks_of("abcdef")
    ranged = type(part)(
        block_hashes={0: part.block_hashes[0][2:4]},  # type: ignore[index, dict-item]
        block_start=2,
        is_whole=False,
        context_id=1,
    )
    handle = bench.tier.evict("op", key("s"), [ranged], purge=False)
    assert handle.status is EditStatus.COMPLETED
    assert bench.state.contexts.num_held(key("s")) == 4
    bench.report()
    assert bench.in_gpu("abcdef") == "abcdef"


def test_leases_and_ends_of_contexts_reach_the_slots() -> None:
    bench = Bench(num_slots=3)
    bench.put("abc")
    bench.state.contexts.keep(key("s"), blocks_of("abc", 1))
    bench.tier.set_lease(key("s"), 1, 9.0)
    assert bench.state.slots.num_available(9) == 0
    residency = bench.tier.query_residency(key("s"), ())
    assert (residency.tier, residency.num_blocks) == ("host", 3)
    bench.tier.release(key("s"), 1)
    assert bench.state.slots.num_available(9) == 3
    assert bench.tier.query_residency(key("s"), ()).num_blocks == 0
    assert bench.in_tier("abc") == "abc"


def test_stats_count_what_is_there() -> None:
    bench = Bench(num_slots=5)
    bench.put("abc")
    bench.state.contexts.keep(key("s"), blocks_of("ab", 1))
    bench.prefetch("ab")
    bench.step()
    stats = bench.tier.stats()
    expected = {
        "host_slots": 5,
        "host_used_slots": 3,
        "host_held_slots": 2,
        "host_pinned_slots": 2,
        "gpu_pinned_blocks": 2,
        "jobs_in_flight": 1,
        "operations_open": 1,
        "queued_saves": 0,
        "host_displaced": 0,
    }
    assert {name: stats[name] for name in expected} == expected


# --- abandoned --------------------------------------------------------------


def abandoned_with_copies_in_flight() -> Bench:
    bench = Bench()
    bench.cache("abcd")
    bench.put("xyz")
    bench.cache("x")
    bench.offload("abcd")
    bench.prefetch("xyz", session="t")
    bench.step()
    bench.tier.abandon()
    return bench


def test_after_an_internal_error_what_ranks_hold_is_given_back_when_they_are_done() -> (
    None
):
    bench = abandoned_with_copies_in_flight()
    # The block "x" was held by the prefetch itself.
    assert bench.state.gpu.num_pins == 6
    assert bench.tier.has_pending_work
    bench.report()
    assert bench.in_tier("abcd") == ""
    assert bench.in_gpu("xyz") == "x"
    assert not bench.tier.has_pending_work
    bench.check_idle()


def test_after_an_internal_error_nothing_is_begun() -> None:
    bench = abandoned_with_copies_in_flight()
    bench.offload("abcd", session="u")
    bench.report()
    assert bench.step() == []
    assert bench.tier.num_new_matched_tokens(request("xyz"), 0) == 0
    assert bench.finish(request("abcd")) == []


def test_what_was_planned_before_an_internal_error_is_sent_all_the_same() -> None:
    """Ranks that never hear of a job would never report it."""
    bench = Bench()
    bench.put("abc")
    blocks = bench.pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    bench.tier.start_load(request("abcd"), [ids], 48)
    bench.tier.abandon()
    bench.tier.abandon()
    assert bench.step() == ["load abc"]
    bench.report()
    bench.pool.free_blocks(blocks)
    bench.check_idle()


@pytest.mark.parametrize("broken", ["publish", "forget"])
def test_an_error_while_a_report_is_handled_leaves_no_block_pinned(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the job at fault nor of the others that ended with it."""
    bench = Bench()
    bench.cache("ab")
    bench.cache("cd")
    bench.put("xyz")
    bench.offload("ab")
    bench.offload("cd", session="t")
    bench.prefetch("xyz", session="u")
    bench.step()

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.state.slots, broken, fail)
    error = "no" if broken == "forget" else None
    results = [RankResult(0, job.job_id, error) for job in bench.jobs]
    with pytest.raises(RuntimeError, match="broken"):
        bench.tier.on_report(results)
    bench.tier.abandon()
    assert not bench.tier.has_pinned_blocks
    assert not bench.tier.has_pending_work
    bench.check_idle()


# --- check_integrity --------------------------------------------------------


def _slot_pinned_by_nobody(bench: Bench) -> None:
    bench.state.slots.allocate(1)


def _block_pinned_by_nobody(bench: Bench) -> None:
    bench.state.gpu.take(1)


def _slot_not_pinned(bench: Bench) -> None:
    bench.state.jobs.start(
        Direction.LOAD,
        [_copy_of(bench)],
        generation=0,
    )


def _copy_of(bench: Bench) -> Any:
    from sam_connector.connector.tier.jobs import Copy

    (content,) = contents("a")
    return Copy(content, bench.pool.blocks[1], bench.state.slots.blocks[1])


@pytest.mark.parametrize(
    "damage", [_slot_pinned_by_nobody, _block_pinned_by_nobody, _slot_not_pinned]
)
def test_check_integrity_sees_damage(damage: Any) -> None:
    bench = Bench()
    bench.put("a")
    bench.check()
    damage(bench)
    with pytest.raises(IntegrityError):
        bench.check()
