"""What a session's hints change, one behaviour at a time.

A context is a string, one letter a block; see ``builders``.
"""

from __future__ import annotations

import pytest

from sam_connector.core.limits import Limits
from sam_connector.core.types import Edit, EditStatus, EditType, GroupId
from tests.core.builders import EVICT, G0, OFFLOAD, PREFETCH, Engine, FakeTier, key

# --- association -------------------------------------------------------------


def test_a_request_is_associated_when_its_blocks_are_assigned() -> None:
    engine = Engine()
    engine.start("s", "abc")
    assert engine.texts("s") == ["abc"]
    assert engine.ref_cnts("abc") == [1, 1, 1]


def test_a_request_that_never_got_blocks_leaves_nothing() -> None:
    engine = Engine()
    request_id = engine.add("s", ttl=60)
    engine.finish(request_id, aborted=True)
    engine.assert_nothing_left()


def test_what_was_generated_is_associated_at_the_end() -> None:
    engine = Engine()
    engine.turn("s", "abc", generated="de")
    assert engine.texts("s") == ["abcde"]


def test_reusing_a_session_does_not_count_it_twice() -> None:
    engine = Engine()
    engine.turn("s", "abc")
    engine.turn("s", "abc", generated="d")
    engine.turn("s", "abcd")
    assert engine.ref_cnts("abcd") == [1, 1, 1, 1]
    assert engine.manager.stats().records == 4


def test_an_aborted_request_keeps_what_it_computed_associated() -> None:
    engine = Engine()
    request_id = engine.start("s", "abcdef", ttl=60)
    engine.finish(request_id, aborted=True, num_computed=2)
    assert engine.texts("s") == ["abcdef"]
    assert engine.deadlines("s") == {"abcdef": 60.0}


def test_an_abort_before_the_first_chunk_does_not_shrink_the_context() -> None:
    engine = Engine()
    engine.turn("s", "abcd", ttl=60)
    request_id = engine.add("s")
    engine.admit(request_id, "abcdef", num_blocks=2)
    engine.finish(request_id, aborted=True, num_computed=0)
    assert engine.texts("s") == ["abcd"]


def test_a_preempted_request_is_associated_again() -> None:
    engine = Engine(num_blocks=7)
    request_id = engine.start("s", "abcd", ttl=60)
    engine.preempt(request_id)
    assert engine.pool.zone_contents()[2] == "dcba"
    engine.pool.free_blocks(engine.fill(6))
    assert engine.manager.stats().claimed_blocks == 0
    engine.admit(request_id, "abcd")
    assert engine.manager.stats().claimed_blocks == 4
    engine.finish(request_id)
    assert engine.pool.zone_contents()[2] == "dcba"


def test_two_tenants_with_the_same_session_id_are_two_sessions() -> None:
    engine = Engine()
    for tenant in ("t", "u"):
        request_id = engine.add("s", tenant=tenant)
        engine.admit(request_id, "abc")
        engine.finish(request_id)
    assert engine.ref_cnts("abc") == [2, 2, 2]
    engine.edit("s", EVICT)
    assert engine.ref_cnts("abc") == [1, 1, 1]


# --- contexts ---------------------------------------------------------------


def test_an_append_only_conversation_is_one_context() -> None:
    engine = Engine()
    for text in ("ab", "abcd", "abcdef"):
        engine.turn("s", text, ttl=60)
    assert engine.texts("s") == ["abcdef"]


def test_a_side_call_never_costs_the_main_context_its_lease() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    for side_call in ("x", "ya", "abcz", "w", "v"):
        engine.turn("s", side_call)
    assert engine.deadlines("s")["abcdefgh"] == 60.0
    assert engine.ref_cnts("abcdefgh") == [1] * 8


def test_a_small_side_call_is_not_recorded_if_only_larger_leases_could_go() -> None:
    engine = Engine(limits=Limits(max_contexts=2))
    engine.turn("s", "abcdef", ttl=60)
    engine.turn("s", "uvwxyz", ttl=60)
    engine.turn("s", "k", ttl=60)
    assert engine.texts("s") == ["abcdef", "uvwxyz"]


def test_the_oldest_context_beyond_the_bound_is_released() -> None:
    engine = Engine(limits=Limits(max_contexts=2))
    for text in ("ab", "cd", "ef"):
        engine.turn("s", text)
    assert engine.texts("s") == ["cd", "ef"]
    assert engine.manager.stats().contexts_dropped == 1
    assert engine.pool.zone_contents()[0].endswith("ba")


def test_a_context_in_use_is_never_released_for_a_newer_one() -> None:
    engine = Engine(limits=Limits(max_contexts=1))
    running = engine.start("s", "ab")
    engine.turn("s", "xyz")
    assert engine.texts("s") == ["ab"]
    engine.finish(running)
    assert engine.texts("s") == ["ab"]


def test_a_rewind_that_keeps_most_of_a_context_replaces_it() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    engine.turn("s", "abcdefxy")
    assert engine.texts("s") == ["abcdefxy"]
    assert engine.deadlines("s") == {"abcdefxy": 60.0}
    assert engine.ref_cnts("abcdefgh") == [1] * 6 + [0, 0]
    assert engine.pool.zone_contents()[0].endswith("hg")


def test_a_truncation_that_keeps_most_of_a_context_replaces_it() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    engine.turn("s", "abcdef", ttl=20)
    assert engine.deadlines("s") == {"abcdef": 20.0}


def test_a_fork_that_keeps_less_than_half_stands_beside_the_context() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    engine.turn("s", "abcxyz")
    assert engine.texts("s") == ["abcdefgh", "abcxyz"]
    assert engine.ref_cnts("abc") == [1, 1, 1]


def test_nothing_is_replaced_before_the_rewind_completes() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    request_id = engine.start("s", "abcdefxy")
    assert engine.texts("s") == ["abcdefgh", "abcdefxy"]
    engine.finish(request_id, aborted=True)
    assert engine.texts("s") == ["abcdefgh", "abcdefxy"]
    assert engine.deadlines("s")["abcdefgh"] == 60.0


def test_a_context_with_a_running_request_is_not_replaced() -> None:
    engine = Engine()
    running = engine.start("s", "abcdefgh", ttl=60)
    engine.turn("s", "abcdefxy")
    assert engine.texts("s") == ["abcdefgh", "abcdefxy"]
    engine.finish(running)
    assert engine.deadlines("s")["abcdefgh"] == 60.0


def test_a_late_completion_of_an_older_request_overwrites_nothing() -> None:
    engine = Engine()
    engine.turn("s", "abcd", ttl=60)
    older = engine.start("s", "abcd", ttl=0)
    newer = engine.start("s", "abcd", ttl=300)
    engine.generate(newer, "ef")
    engine.finish(newer)
    engine.generate(older, "xy")
    engine.finish(older)
    assert engine.deadlines("s") == {"abcdef": 300.0}


def test_an_older_rewind_does_not_replace_what_a_newer_request_extended() -> None:
    engine = Engine()
    engine.turn("s", "abcdefgh", ttl=60)
    rewind = engine.start("s", "abcdefxy")
    engine.turn("s", "abcdefgh", generated="ij")
    engine.finish(rewind)
    assert "abcdefghij" in engine.texts("s")


# --- evict ------------------------------------------------------------------


def test_evict_makes_a_sessions_blocks_the_next_to_be_reused_tail_first() -> None:
    engine = Engine(num_blocks=17)
    engine.turn("other", "pqr")
    engine.turn("s", "abcdef", ttl=60)
    (result,) = engine.edit("s", EVICT)
    assert result.status is EditStatus.COMPLETED
    assert (result.blocks.requested, result.blocks.done) == (6, 6)
    assert engine.pool.free_contents()[:6] == "fedcba"
    assert engine.texts("s") == []


def test_evicted_blocks_are_hit_until_they_are_reused() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", EVICT)
    request_id = engine.add("s")
    before = engine.pool.num_free_blocks
    engine.admit(request_id, "abc")
    assert engine.pool.num_free_blocks == before - 3
    assert engine.pool.free_contents().strip("_") == ""


def test_evict_orders_a_context_of_several_pieces_tail_first() -> None:
    engine = Engine()
    engine.turn("s", "ab")
    engine.turn("s", "abcd", ttl=60)
    engine.turn("s", "abxy")
    engine.turn("s", "abcdef", ttl=60)
    engine.edit("s", EVICT)
    letters = [c for c in engine.pool.free_contents() if c in "abcdef"]
    assert "".join(letters) == "fedcba"


def test_evict_touches_no_block_that_another_session_holds() -> None:
    engine = Engine()
    engine.turn("u", "abxy", ttl=60)
    engine.turn("s", "abcd", ttl=60)
    engine.edit("s", EVICT)
    assert engine.pool.free_contents()[:2] == "dc"
    assert engine.pool.zone_contents()[2] == "yxba"


def test_evict_touches_no_block_in_use() -> None:
    engine = Engine(num_blocks=9)
    running = engine.start("s", "abc", ttl=60)
    stranger = engine.start(None, "abxy")
    engine.edit("s", EVICT)
    engine.step()
    blocks = [block for run in engine.runs.values() for block in run.blocks[G0]]
    assert {block.ref_cnt for block in blocks} == {1, 2}
    assert not any(block.is_free for block in blocks)
    engine.finish(running)
    # Only its own: "ab" is still in use by somebody the session knows nothing of.
    assert engine.pool.free_contents()[0] == "c"
    engine.finish(stranger)
    assert engine.pool.free_contents() == "c___yxba"


def test_evict_while_a_request_runs_restores_nothing_afterwards() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    running = engine.start("s", "abcd", ttl=60)
    engine.edit("s", EVICT)
    engine.generate(running, "ef")
    engine.finish(running)
    engine.assert_nothing_left()
    assert engine.pool.free_contents().startswith("dcba")


def test_an_evicted_request_that_is_preempted_and_resumed_restores_nothing() -> None:
    engine = Engine()
    running = engine.start("s", "abcd", ttl=60)
    engine.edit("s", EVICT)
    engine.preempt(running)
    engine.admit(running, "abcd")
    assert engine.manager.stats().records == 0
    engine.finish(running)
    engine.assert_nothing_left()


def test_a_request_after_the_evict_is_recorded_though_an_older_one_runs() -> None:
    engine = Engine()
    older = engine.start("s", "abcd", ttl=60)
    engine.edit("s", EVICT)
    engine.turn("s", "abxy", ttl=60)
    engine.finish(older)
    assert engine.deadlines("s") == {"abxy": 60.0}


def test_an_evict_in_a_hint_takes_effect_at_completion() -> None:
    engine = Engine()
    request_id = engine.start("s", "abc", ttl=60, edits=[EVICT])
    assert engine.texts("s") == ["abc"]
    (result,) = engine.finish(request_id)
    assert result.status is EditStatus.COMPLETED
    assert engine.pool.free_contents().startswith("cba")
    engine.assert_nothing_left()


def test_edits_of_an_aborted_request_are_carried_out_too() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    request_id = engine.add("s", edits=[EVICT])
    engine.finish(request_id, aborted=True)
    engine.assert_nothing_left()


def test_freeing_a_session_is_no_evict() -> None:
    engine = Engine(num_blocks=9)
    engine.turn("s", "abc", ttl=60)
    assert engine.manager.free_session(key("s")) == 1
    assert engine.manager.free_session(key("s")) == 0
    assert engine.pool.zone_contents()[0] == "_____cba"
    engine.assert_nothing_left()


def test_a_request_of_a_freed_session_records_nothing() -> None:
    engine = Engine()
    running = engine.start("s", "abc", ttl=60)
    engine.manager.free_session(key("s"))
    engine.finish(running)
    engine.assert_nothing_left()


def test_a_request_of_a_freed_session_does_not_touch_its_namesake() -> None:
    engine = Engine()
    older = engine.start("s", "abcd", ttl=5)
    engine.manager.free_session(key("s"))
    newer = engine.start("s", "abcd", ttl=300)
    engine.finish(older)
    assert engine.deadlines("s") == {"abcd": 300.0}
    engine.finish(newer)
    engine.check_integrity()


def test_a_session_tree_is_freed_children_first() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("lead", "ab", ttl=60)
    engine.turn("child", "abc", ttl=60, parent="lead")
    engine.turn("grandchild", "abcd", ttl=60, parent="child")
    engine.turn("stranger", "abx")
    tier.released.clear()
    assert engine.manager.free_session(key("lead"), tree=True) == 3
    assert [session.session_id for session, _ in tier.released] == [
        "grandchild",
        "child",
        "lead",
    ]
    assert engine.ref_cnts("abcd") == [1, 1, 0, 0]


def test_a_parent_cycle_is_rejected_and_the_request_unharmed() -> None:
    engine = Engine()
    engine.turn("a", "ab", parent="b")
    engine.turn("b", "ab", parent="a", ttl=60)
    assert engine.manager.stats().hints_rejected == 1
    assert engine.deadlines("b") == {"ab": 60.0}
    engine.check_integrity()


# --- without a tier, and in general -----------------------------------------


@pytest.mark.parametrize("edit", [OFFLOAD, PREFETCH])
def test_offload_and_prefetch_are_unsupported_without_a_tier(edit: Edit) -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    (result,) = engine.edit("s", edit)
    assert result.status is EditStatus.UNSUPPORTED
    assert result.operation_id is None
    assert result.reason
    assert engine.pool.zone_contents()[2] == "cba"


def test_an_unknown_session_is_not_found() -> None:
    engine = Engine()
    for result in engine.edit("nobody", EVICT, OFFLOAD, PREFETCH):
        assert result.status is EditStatus.NOT_FOUND
    engine.assert_nothing_left()


def test_a_reset_forgets_every_claim_and_the_sessions_without_requests() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    running = engine.start("u", "xyz", ttl=60)
    engine.preempt(running)
    assert engine.reset()
    assert engine.manager.stats().records == 0
    assert engine.manager.stats().sessions == 1
    engine.admit(running, "xyz")
    engine.finish(running)
    assert engine.deadlines("u") == {"xyz": 60.0}
    engine.check_integrity()


def test_two_requests_with_one_id_do_not_leak() -> None:
    engine = Engine()
    request_id = engine.add("s")
    engine.num_requests -= 1
    assert engine.add("u") == request_id
    engine.admit(request_id, "abc")
    engine.finish(request_id)
    assert engine.manager.stats().hints_rejected == 1
    engine.manager.free_session(key("s"))
    engine.assert_nothing_left()


def test_blocks_of_two_groups_are_kept_together() -> None:
    engine = Engine(groups=(GroupId(0), GroupId(3)))
    engine.turn("s", "abc", generated="d", ttl=60)
    assert engine.manager.stats().protected_blocks == 8
    engine.step(61)
    engine.edit("s", EVICT)
    assert sorted(engine.pool.free_contents()[:8]) == list("aabbccdd")
    engine.assert_nothing_left()


def test_shadow_mode_accounts_and_never_changes_the_order() -> None:
    shadow = Engine(num_blocks=12, enforce=False)
    stock = Engine(num_blocks=12, managed=False)
    enforced = Engine(num_blocks=12)
    for engine in (shadow, stock, enforced):
        engine.turn("s", "abc", ttl=60)
        engine.turn("u", "abxy", ttl=5)
        engine.turn(None, "pq")
        engine.step(6)
        if engine.managed:
            engine.edit("u", EVICT)
        engine.pool.free_blocks(engine.fill(5))
    assert shadow.pool.free_order() == stock.pool.free_order()
    assert shadow.pool.free_order() != enforced.pool.free_order()
    stats = shadow.manager.stats()
    assert (stats.sessions, stats.leases_granted, stats.leases_expired) == (1, 4, 1)
    assert stats.edits == {"evict/completed": 1}
    shadow.check_integrity()


def test_requests_without_a_session_cost_and_change_nothing() -> None:
    engine = Engine(num_blocks=12)
    stock = Engine(num_blocks=12, managed=False)
    for text in ("abc", "abxy", "pq", "abc"):
        engine.turn(None, text)
        stock.turn(None, text)
        assert engine.pool.free_order() == stock.pool.free_order()
        assert engine.manager.is_idle


def test_one_step_expires_a_bounded_number_of_contexts() -> None:
    engine = Engine(limits=Limits(max_expiries_per_step=3))
    for number in range(10):
        engine.turn(f"s{number}", "a", ttl=5)
    engine.step(10)
    for expired in (3, 6, 9, 10, 10):
        assert engine.manager.stats().leases_expired == expired
        engine.step()


def test_one_allocation_expires_a_bounded_number_of_contexts() -> None:
    engine = Engine(num_blocks=17, limits=Limits(max_expiries_per_step=3))
    for number in range(10):
        engine.turn(f"s{number}", f"{number}", ttl=5)
    engine.now += 10
    engine.fill(12)
    assert engine.manager.stats().leases_expired == 3


def test_the_capabilities_of_a_tier_are_respected() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", PREFETCH, EVICT)
    assert [call[0] for call in tier.calls] == ["register_cache"]


def test_the_edits_of_a_request_spare_a_session_begun_anew_under_its_id() -> None:
    engine = Engine()
    old = engine.start("s", "abc", edits=(EVICT,))
    engine.manager.free_session(key("s"))
    engine.turn("s", "xyz", ttl=60)
    engine.finish(old)
    assert engine.manager.stats().protected_blocks == 3


def test_a_tree_is_freed_whatever_the_order_of_its_leases() -> None:
    engine = Engine()
    engine.turn("p", "abc", ttl=60)
    for number in range(5):
        engine.turn(f"c{number}", "abc" + "vwxyz"[number], ttl=50 - number, parent="p")
    assert engine.manager.free_session(key("p"), tree=True) == 6
    engine.check_integrity()
    assert engine.manager.stats().claimed_blocks == 0
