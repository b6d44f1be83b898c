"""What is saved without being asked for, and when."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.config import SavePolicy
from sam_connector.connector.tier import saves
from sam_connector.core.types import Zone
from tests.connector.tier.bench import Bench, request
from tests.core.builders import key
from tests.core.slots import blocks_of

pytestmark = pytest.mark.vllm

ALL, HINTED = SavePolicy.ALL, SavePolicy.HINTED


def hinted(**more: Any) -> Bench:
    """Fewer unclaimed blocks than the window from the start."""
    more.setdefault("num_blocks", 8)
    more.setdefault("window", 8)
    return Bench(policy=HINTED, **more)


def finish_of_session(
    bench: Bench, text: str, session: str = "s", request_id: str = "r"
) -> list[str]:
    """A request of a session ends, in the order in which the tier hears of it."""
    blocks = bench.know(text, session)
    bench.tier.register_cache(key(session), request_id, lambda: blocks)
    return bench.finish(request(text, request_id))


# --- all --------------------------------------------------------------------


def test_all_saves_what_a_request_has_when_it_ends() -> None:
    bench = Bench(policy=ALL)
    assert bench.finish(request("abc")) == ["store abc"]
    bench.step()
    bench.report()
    assert bench.in_tier("abc") == "abc"
    assert bench.state.contexts.num_claimed == 0
    bench.check_idle()


def test_all_saves_only_what_the_tier_lacks() -> None:
    bench = Bench(policy=ALL)
    bench.put("ab")
    assert bench.finish(request("abcd")) == ["store cd"]
    assert bench.finish(request("abcd", "again")) == ["store cd"]
    assert bench.finish(request("abcde", "more")) == ["store cd", "store e"]


def test_blocks_that_do_not_hold_what_is_expected_are_not_saved() -> None:
    """A request that was preempted may have lost its blocks to others."""
    bench = Bench(policy=ALL)
    blocks = bench.compute("abc")
    bench.pool.evict_blocks({blocks[1].block_id})
    ids = [block.block_id for block in blocks]
    bench.tier.on_request_finished(request("abc"), [[*ids[:2], 0]])
    assert bench.step() == ["store a"]


def test_what_all_saves_of_a_session_is_the_sessions() -> None:
    bench = Bench(policy=ALL)
    assert finish_of_session(bench, "abc") == ["store abc"]
    bench.step()
    bench.report()
    assert bench.state.contexts.num_held(key("s")) == 3


def test_what_exceeds_the_budget_waits_for_its_turn() -> None:
    bench = Bench(policy=ALL, budget=3)
    assert bench.finish(request("abcdefg")) == ["store abc"]
    assert bench.tier.stats()["queued_saves"] == 4
    assert bench.step() == ["store abc"]
    bench.report()
    assert bench.tier.has_pending_work
    assert bench.step() == ["store def"]
    bench.report()
    assert bench.step() == ["store g"]
    bench.report()
    assert bench.in_tier("abcdefg") == "abcdefg"
    assert bench.tier.stats()["queued_saves"] == 0
    bench.check_idle()


def test_what_is_gone_or_saved_by_its_turn_is_passed_over() -> None:
    bench = Bench(policy=ALL, budget=1)
    bench.finish(request("abcd"))
    bench.lose("abc")
    bench.put("ab")
    bench.step()
    bench.report()
    assert bench.step() == ["store d"]


def test_a_block_that_is_queued_twice_is_saved_once() -> None:
    bench = Bench(policy=ALL, budget=2)
    bench.finish(request("xy"))
    bench.finish(request("a", "r1"))
    bench.finish(request("a", "r2"))
    assert bench.tier.stats()["queued_saves"] == 2
    bench.step()
    bench.report()
    assert bench.step() == ["store a"]


def test_what_a_session_has_queued_is_the_sessions_once_it_is_saved() -> None:
    bench = Bench(policy=ALL, budget=2)
    finish_of_session(bench, "abcd")
    bench.run()
    assert bench.state.contexts.num_held(key("s")) == 4


def test_beyond_the_backlog_the_oldest_are_not_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saves, "_MAX_BACKLOG", 2)
    bench = Bench(policy=ALL, budget=1)
    bench.finish(request("abcde"))
    stats = bench.tier.stats()
    assert (stats["queued_saves"], stats["saves_dropped"]) == (2, 2)
    bench.run()
    assert bench.in_tier("abcde") == "ade"


def test_what_the_tier_has_no_room_for_is_counted() -> None:
    bench = Bench(policy=ALL, num_slots=3)
    bench.put("xy")
    bench.state.contexts.keep(key("t"), blocks_of("xy", 9, deadline=9.0))
    bench.finish(request("abc"))
    assert bench.tier.stats()["saves_dropped"] == 2
    bench.run()
    assert bench.in_tier("abc") == "a"
    assert bench.in_tier("xy") == "xy"


def test_a_reset_forgets_what_is_queued() -> None:
    bench = Bench(policy=ALL, budget=1)
    bench.finish(request("abcd"))
    bench.tier.reset()
    bench.step()
    bench.report()
    assert bench.step() == []
    assert bench.in_tier("abcd") == ""


# --- hinted -----------------------------------------------------------------


def test_hinted_saves_what_a_session_has_added_while_it_is_in_hand() -> None:
    bench = hinted()
    bench.claim("", Zone.B)
    bench.compute("wxyz")
    assert finish_of_session(bench, "abc") == ["store abc"]
    bench.step()
    bench.report()
    assert bench.state.contexts.num_held(key("s")) == 3


def test_hinted_saves_nothing_of_anybody_else() -> None:
    bench = hinted()
    bench.compute("wxyz")
    assert bench.finish(request("abc")) == []
    assert bench.step() == []


def test_hinted_saves_nothing_while_there_is_room() -> None:
    bench = hinted(num_blocks=16, window=4)
    assert finish_of_session(bench, "abc") == []
    assert bench.step() == []
    assert bench.tier._contexts_of == {}


def test_hinted_copies_what_is_about_to_be_lost_next_to_be_lost_first() -> None:
    bench = hinted(window=3)
    for text, session in (("ab", "s"), ("cd", "t"), ("ef", "u")):
        bench.cache(text)
        bench.know(text, session)
        bench.claim(text, Zone.B, session)
    # Two blocks unclaimed, three wanted: a look at one block.
    assert bench.step() == ["store b"]
    bench.report()
    assert bench.state.contexts.num_held(key("s")) == 1
    assert bench.step() == []
    running = bench.pool.get_new_blocks(2)
    assert bench.step() == ["store ad"]
    bench.report()
    assert bench.state.contexts.num_held(key("t")) == 1
    bench.pool.free_blocks(running)
    bench.check_idle()


def test_what_was_copied_ahead_keeps_its_place_in_line() -> None:
    bench = hinted(window=4)
    for text, session in (("ab", "s"), ("cd", "t"), ("ef", "u")):
        bench.cache(text)
        bench.claim(text, Zone.B, session)
    before = [b.block_id for b in bench.pool.free_block_queue.get_all_free_blocks()]
    assert bench.step() == ["store ba"]
    bench.report()
    after = [b.block_id for b in bench.pool.free_block_queue.get_all_free_blocks()]
    assert after == before


def test_leased_blocks_are_copied_ahead_as_well() -> None:
    bench = hinted(num_blocks=4, window=2)
    bench.cache("ab")
    bench.claim("ab", Zone.C)
    bench.compute("xy")
    assert bench.step() == ["store ba"]


def test_demotion_keeps_to_the_budget() -> None:
    bench = hinted(num_blocks=4, window=9, budget=3)
    bench.cache("abcd")
    bench.claim("abcd", Zone.B)
    assert bench.step() == ["store dcb"]
    assert bench.step() == []
    bench.report()
    assert bench.step() == ["store a"]


def test_a_block_is_demoted_once() -> None:
    """In a tier that is too small blocks would else displace each other for ever."""
    bench = hinted(window=9, num_slots=2)
    bench.cache("abcd")
    bench.claim("abcd", Zone.B)
    assert bench.step() == ["store dc"]
    bench.report()
    for _ in range(4):
        bench.pool.get_new_blocks(1)
        assert bench.tier.is_due
        assert bench.step() == []
    assert bench.in_tier("abcd") == "cd"


def test_a_block_with_other_content_is_demoted_anew() -> None:
    bench = hinted(num_blocks=2, window=9)
    bench.cache("ab")
    bench.claim("ab", Zone.B)
    bench.step()
    bench.report()
    bench.adapter.free_queue.unclaim_all()
    bench.cache("xy")
    bench.claim("xy", Zone.B)
    assert bench.step() == ["store yx"]


def test_without_sessions_there_is_nothing_to_demote() -> None:
    bench = hinted()
    bench.cache("abcdefgh")
    assert bench.step() == []


def test_demotion_looks_again_once_enough_blocks_were_handed_out() -> None:
    """The look costs time in every step of the engine."""
    bench = hinted(num_blocks=40, window=32)
    bench.cache("ab")
    bench.claim("ab", Zone.B)
    taken = bench.pool.get_new_blocks(7)
    assert bench.tier.is_due
    assert bench.step() == ["store b"]  # 31 of the 32 blocks are unclaimed
    bench.report()
    assert not bench.tier.is_due
    taken += bench.pool.get_new_blocks(3)
    assert not bench.tier.is_due
    taken += bench.pool.get_new_blocks(1)
    assert bench.tier.is_due
    assert bench.step() == ["store a"]
    bench.report()
    bench.pool.free_blocks(taken)
    bench.check_idle()


def test_what_the_budget_did_not_allow_is_looked_at_in_the_next_step() -> None:
    bench = hinted(num_blocks=40, window=80, budget=2)
    bench.cache("abcd")
    bench.claim("abcd", Zone.B)
    assert bench.step() == ["store dc"]
    bench.report()
    assert bench.tier.is_due
    assert bench.step() == ["store ba"]


def test_steps_with_nothing_to_do_cost_nothing() -> None:
    bench = Bench(policy=ALL, budget=1)
    assert not bench.tier.is_due
    bench.finish(request("abc"))
    assert bench.tier.is_due  # the ranks have not heard of it, and two are queued
    bench.run()
    assert not bench.tier.is_due
    bench.offload("abc")
    assert bench.tier.is_due
    bench.step()
    assert not bench.tier.is_due


# --- on_demand --------------------------------------------------------------


def test_on_demand_saves_nothing() -> None:
    bench = Bench(num_blocks=4, window=9)
    bench.cache("ab")
    bench.claim("ab", Zone.B)
    assert finish_of_session(bench, "cd") == []
    assert bench.step() == []


def test_what_a_policy_saves_is_kept_though_an_offload_of_it_is_cancelled() -> None:
    bench = Bench(policy=ALL)
    bench.finish(request("abc"))
    bench.offload("abc")
    bench.step()
    bench.evict("abc")
    bench.report()
    assert bench.in_tier("abc") == "abc"
    assert bench.state.contexts.num_claimed == 0


def test_a_demotion_that_failed_may_be_tried_again() -> None:
    bench = hinted(window=9)
    bench.cache("ab")
    bench.claim("ab", Zone.B)
    assert bench.step() == ["store ba"]
    bench.report(error="broken")
    bench.pool.get_new_blocks(1)
    assert bench.step() == ["store ba"]
