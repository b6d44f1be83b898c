"""Offload, copy by copy, and how operations are cancelled."""

from __future__ import annotations

import pytest

from sam_connector.core.tiers import OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus
from tests.connector.tier.bench import BLOCK_BYTES, Bench
from tests.core.builders import key
from tests.core.slots import blocks_of, contents

pytestmark = pytest.mark.vllm


def only(bench: Bench) -> OperationHandle:
    """How the one operation ended."""
    ended = bench.ended()
    assert len(ended) == 1, ended
    return next(iter(ended.values()))


def test_an_offload_is_begun_in_the_next_step_and_ends_with_its_copies() -> None:
    bench = Bench()
    bench.cache("abc")
    assert bench.offload("abc").status is EditStatus.ACCEPTED
    assert bench.state.gpu.num_pins == 0
    assert bench.step() == ["store abc"]
    assert bench.step() == []
    assert bench.ended() == {}
    bench.report()
    handle = only(bench)
    assert handle.status is EditStatus.COMPLETED
    assert handle.blocks == BlockCounts(requested=3, done=3)
    assert (handle.num_bytes, handle.reason) == (3 * BLOCK_BYTES, None)
    assert handle.is_safe
    assert bench.in_tier("abc") == bench.in_gpu("abc") == "abc"
    assert bench.state.contexts.num_held(key("s")) == 3
    bench.check_idle()


def test_what_the_tier_has_is_not_copied_again() -> None:
    bench = Bench()
    bench.put("ab")
    bench.cache("abcd")
    bench.offload("abcd")
    assert bench.step() == ["store cd"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=4, done=2, already=2)
    assert bench.state.contexts.num_held(key("s")) == 4


def test_an_offload_of_what_is_all_there_ends_in_the_next_step() -> None:
    bench = Bench()
    bench.put("ab")
    bench.offload("ab")
    assert bench.step() == []
    handle = only(bench)
    assert (handle.status, handle.num_bytes) == (EditStatus.COMPLETED, 0)
    assert bench.state.contexts.num_held(key("s")) == 2


def test_what_is_in_no_cache_is_missing_and_the_rest_is_safe() -> None:
    bench = Bench()
    bench.cache("abcd")
    bench.lose("abcd")
    bench.offload("abcd")
    bench.run()
    handle = only(bench)
    assert handle.status is EditStatus.PARTIAL
    assert handle.blocks == BlockCounts(requested=4, done=3, missing=1)
    assert handle.reason
    assert handle.is_safe  # the engine has no more of it than the tier


def test_an_offload_of_nothing_that_is_anywhere_is_rejected() -> None:
    bench = Bench()
    bench.offload("abcd")
    bench.step()
    handle = only(bench)
    assert handle.status is EditStatus.REJECTED
    assert handle.blocks.missing == 4


def test_the_prefix_that_contexts_share_is_copied_once() -> None:
    bench = Bench()
    bench.cache("abcd")
    bench.cache("abxy")
    bench.offload("abcd", "abxy")
    assert bench.step() == ["store abcdxy"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=6, done=6)
    assert bench.state.contexts.num_held(key("s")) == 8
    assert bench.state.contexts.num_claimed == 6


def test_an_offload_goes_on_as_far_as_the_budget_allows() -> None:
    bench = Bench(budget=3)
    bench.cache("abcdefg")
    bench.offload("abcdefg")
    assert bench.step() == ["store abc"]
    assert bench.step() == []
    bench.report()
    assert bench.step() == ["store def"]
    bench.report()
    assert bench.ended() == {}
    assert bench.step() == ["store g"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=7, done=7)


def test_two_offloads_of_the_same_blocks_copy_them_once() -> None:
    bench = Bench()
    bench.cache("abcd")
    bench.offload("abc")
    assert bench.step() == ["store abc"]
    bench.offload("abcd", session="t")
    assert bench.step() == ["store d"]
    first, second = bench.jobs
    bench.report(second)
    assert bench.ended() == {}
    bench.report(first)
    ended = bench.ended()
    assert ended["op-1"].blocks == BlockCounts(requested=3, done=3)
    assert ended["op-2"].blocks == BlockCounts(requested=4, done=1, already=3)
    assert ended["op-2"].num_bytes == BLOCK_BYTES
    assert bench.state.contexts.num_held(key("t")) == 4


def test_an_offload_of_which_a_copy_fails_is_not_safe() -> None:
    bench = Bench(budget=2)
    bench.cache("abcd")
    bench.offload("abcd")
    bench.step()
    bench.report()
    bench.step()
    bench.report(error="no")
    handle = only(bench)
    assert handle.status is EditStatus.PARTIAL
    assert handle.blocks == BlockCounts(requested=4, done=2, missing=2)
    assert handle.reason == "rank 0: no"
    assert not handle.is_safe
    assert bench.in_tier("abcd") == "ab"
    assert bench.state.contexts.num_held(key("s")) == 2
    bench.check_idle()


def test_whoever_waits_for_a_copy_that_fails_hears_of_it() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.offload("abc")
    bench.step()
    bench.offload("abc", session="t")
    bench.step()
    bench.report(error="no")
    handles = bench.ended().values()
    assert [h.status for h in handles] == [EditStatus.REJECTED] * 2
    assert not any(h.is_safe for h in handles)


def test_an_offload_during_which_the_cache_is_reset_is_not_safe() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.offload("abc")
    bench.step()
    bench.tier.reset()
    bench.report()
    handle = only(bench)
    assert (handle.status, handle.is_safe) == (EditStatus.REJECTED, False)
    assert handle.reason == "the cache was reset"
    assert bench.in_tier("abc") == ""
    bench.check_idle()


def test_what_is_lost_before_its_turn_is_not_copied() -> None:
    bench = Bench(budget=2)
    bench.cache("abcd")
    bench.offload("abcd")
    bench.step()
    bench.lose("abcd")
    bench.report()
    assert bench.step() == ["store c"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=4, done=3, missing=1)


def test_a_tier_full_of_leases_says_so() -> None:
    bench = Bench(num_slots=3)
    bench.put("xyz")
    bench.state.contexts.keep(key("t"), blocks_of("xyz", 9, deadline=9.0))
    bench.cache("ab")
    bench.offload("ab")
    assert bench.step() == []
    handle = only(bench)
    assert (handle.status, handle.is_safe) == (EditStatus.REJECTED, False)
    assert handle.reason == "the host tier is full of leased contexts"
    assert bench.in_tier("xyz") == "xyz"
    bench.check_idle()


def test_an_offload_waits_for_slots_that_copies_will_give_back() -> None:
    bench = Bench(num_slots=3)
    bench.put("xyz")
    bench.state.contexts.keep(key("t"), blocks_of("xyz", 9, deadline=9.0))
    bench.prefetch("xyz", session="t", first_id=9)
    assert bench.step() == ["load xyz"]
    bench.cache("ab")
    bench.offload("ab")
    assert bench.step() == []
    assert bench.ended() == {}
    bench.state.contexts.set_lease(key("t"), 9, 0.0)
    bench.report()
    assert bench.step() == ["store ab"]
    bench.report()
    assert bench.ended()["op-2"].is_safe


def test_an_offload_does_not_wait_for_slots_for_ever() -> None:
    """Others may keep copies under way all the time."""
    bench = Bench(num_slots=3)
    bench.put("xyz")
    bench.state.contexts.keep(key("t"), blocks_of("xyz", 9, deadline=9.0))
    bench.prefetch("xyz", session="t", first_id=9)
    bench.step()
    bench.cache("ab")
    bench.offload("ab")
    for _ in range(4):
        assert bench.ended() == {}
        bench.step()
        bench.clock.advance(0.6)
    bench.step()
    handle = only(bench)
    assert (handle.status, handle.is_safe) == (EditStatus.REJECTED, False)
    assert handle.blocks.missing == 2
    bench.report()
    bench.check_idle()


def test_an_offload_that_got_slots_meanwhile_may_wait_anew() -> None:
    bench = Bench(num_slots=5)
    bench.put("xyz")
    bench.state.contexts.keep(key("t"), blocks_of("xyz", 9, deadline=9.0))
    bench.prefetch("xyz", session="t", first_id=9)
    bench.step()
    bench.cache("abcd")
    bench.offload("abcd")
    assert bench.step() == ["store ab"]
    (_, store) = bench.jobs
    bench.clock.advance(5.0)
    bench.report(store)
    bench.step()
    bench.clock.advance(1.9)
    bench.step()
    assert bench.ended() == {}
    bench.clock.advance(0.2)
    bench.step()
    assert only(bench).blocks == BlockCounts(requested=4, done=2, missing=2)


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("num_there", [0, 5])
def test_an_offload_that_the_tier_cannot_hold_is_not_safe(
    num_there: int, budget: int
) -> None:
    """It must not count what its own later blocks have displaced."""
    bench = Bench(num_slots=6, budget=budget)
    bench.cache("abcdefghij")
    bench.put("abcdefghij"[:num_there])
    bench.offload("abcdefghij")
    bench.run()
    handle = only(bench)
    assert len(bench.in_tier("abcdefghij")) <= 6
    assert handle.status is EditStatus.PARTIAL
    assert not handle.is_safe
    assert handle.blocks.done + handle.blocks.already <= 6
    bench.check_idle()


def test_blocks_that_the_engine_needs_are_not_pinned_for_long() -> None:
    bench = Bench()
    blocks = bench.cache("abc")
    bench.offload("abc")
    bench.step()
    assert bench.tier.has_pinned_blocks
    bench.report()
    assert not bench.tier.has_pinned_blocks
    assert [block.ref_cnt for block in blocks] == [0, 0, 0]


# --- cancelled --------------------------------------------------------------


def test_an_evict_cancels_an_offload_and_what_was_copied_is_not_kept() -> None:
    bench = Bench(budget=2)
    bench.cache("abcd")
    bench.offload("abcd")
    bench.step()
    bench.evict("abcd")
    handle = only(bench)
    assert (handle.status, handle.reason) == (
        EditStatus.REJECTED,
        "cancelled by evict",
    )
    assert not handle.is_safe
    assert bench.step() == []
    bench.report()
    assert bench.in_tier("abcd") == ""
    assert len(bench.state.contexts) == 0
    assert bench.ended() == {}
    bench.check_idle()


def test_an_evict_cancels_a_prefetch_and_what_was_loaded_is_not_published() -> None:
    bench = Bench(budget=2)
    bench.put("abcd")
    bench.prefetch("abcd")
    bench.step()
    bench.evict("abcd")
    assert only(bench).reason == "cancelled by evict"
    assert bench.step() == []
    bench.report()
    assert bench.in_gpu("abcd") == ""
    assert bench.directory.restored == []
    bench.check_idle()


def test_what_another_session_waits_for_is_kept_all_the_same() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.put("xyz")
    bench.offload("abc")
    bench.prefetch("xyz", first_id=2)
    bench.step()
    bench.offload("abc", session="t")
    bench.prefetch("xyz", session="t", first_id=2)
    bench.step()
    bench.evict("abc", "xyz")
    bench.report()
    ended = bench.ended()
    assert [ended[f"op-{n}"].status.value for n in range(1, 5)] == [
        "rejected",
        "rejected",
        "completed",
        "completed",
    ]
    assert bench.in_tier("abc") == "abc"
    assert bench.in_gpu("xyz") == "xyz"
    assert bench.state.contexts.num_held(key("s")) == 0
    assert bench.state.contexts.num_held(key("t")) == 3
    bench.check_idle()


def test_a_copy_that_is_lost_before_the_offload_ends_makes_it_unsafe() -> None:
    """The engine must not give up what the tier has lost again."""
    bench = Bench()
    bench.put("ab")
    bench.cache("abc")
    bench.offload("abc")
    bench.step()
    bench.state.slots.forget(contents("a")[0])
    bench.run()
    handle = bench.ended()["op-1"]
    assert (handle.status, handle.is_safe) == (EditStatus.PARTIAL, False)
    assert (handle.blocks.done, handle.blocks.already) == (1, 1)
    assert handle.reason == "a copy in the tier was lost"
