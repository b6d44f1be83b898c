"""Offload and prefetch, copy by copy."""

from __future__ import annotations

import pytest

from sam_connector.core.tiers import OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus, Zone
from tests.connector.tier.bench import BLOCK_BYTES, Bench
from tests.core.builders import key
from tests.core.slots import blocks_of

pytestmark = pytest.mark.vllm


def only(bench: Bench) -> OperationHandle:
    """How the one operation ended."""
    ended = bench.ended()
    assert len(ended) == 1, ended
    return next(iter(ended.values()))


# --- offload ----------------------------------------------------------------


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


# --- prefetch ---------------------------------------------------------------


def test_a_prefetch_brings_a_context_back() -> None:
    bench = Bench()
    bench.put("abc")
    assert bench.prefetch("abc").status is EditStatus.ACCEPTED
    assert bench.step() == ["load abc"]
    assert bench.in_gpu("abc") == ""  # not before it is there
    bench.report()
    handle = only(bench)
    assert handle.status is EditStatus.COMPLETED
    assert handle.blocks == BlockCounts(requested=3, done=3)
    assert handle.num_bytes == 3 * BLOCK_BYTES
    assert bench.in_gpu("abc") == bench.in_tier("abc") == "abc"
    assert bench.directory.restored == [("s", 1, "abc")]
    bench.check_idle()


def test_what_the_engine_has_is_neither_loaded_nor_displaced_by_the_rest() -> None:
    """The free blocks next in line are the very prefix that is to be continued."""
    bench = Bench(num_blocks=8)
    bench.put("abcdefgh")
    bench.cache("abcd")
    bench.cache("wxyz")
    bench.pool.touch([])
    assert bench.pool.free_block_queue.get_all_free_blocks()[0].block_hash is not None
    bench.prefetch("abcdefgh")
    assert bench.step() == ["load efgh"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=8, done=4, already=4)
    assert bench.in_gpu("abcdefgh") == "abcdefgh"
    bench.check_idle()


def test_beyond_a_gap_nothing_is_loaded() -> None:
    bench = Bench()
    bench.put("abcde")
    bench.state.slots.forget(
        next(c for c in bench.state.slots.contents() if c[1] == b"abc")
    )
    bench.prefetch("abcde")
    assert bench.step() == ["load ab"]
    bench.report()
    handle = only(bench)
    assert handle.status is EditStatus.PARTIAL
    assert handle.blocks == BlockCounts(requested=5, done=2, missing=3)


def test_a_gap_in_the_engine_is_filled_from_the_tier() -> None:
    bench = Bench()
    bench.put("abcde")
    bench.cache("abcde")
    bench.lose("abc")
    bench.prefetch("abcde")
    assert bench.step() == ["load c"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=5, done=1, already=4)


def test_a_prefetch_leaves_the_reserve_free() -> None:
    bench = Bench(num_blocks=9, reserve=0.3)
    bench.put("abcdefgh")
    bench.prefetch("abcdefgh")
    assert bench.step() == ["load abcdef"]
    assert bench.pool.get_num_free_blocks() == 3
    bench.report()
    handle = only(bench)
    assert handle.status is EditStatus.PARTIAL
    assert handle.reason == "no room in the engine's cache beyond the reserve"
    assert bench.in_gpu("abcdefgh") == "abcdef"
    bench.check_idle()


def test_a_prefetch_breaks_no_lease_in_the_engine() -> None:
    bench = Bench(num_blocks=6)
    bench.cache("wxyz")
    bench.claim("wxyz", Zone.C)
    bench.put("abcd")
    bench.prefetch("abcd")
    assert bench.step() == ["load ab"]
    assert bench.in_gpu("wxyz") == "wxyz"
    bench.report()
    assert only(bench).status is EditStatus.PARTIAL


def test_without_any_room_a_prefetch_ends_at_once() -> None:
    bench = Bench(num_blocks=4)
    running = bench.compute("wxyz")
    bench.put("ab")
    bench.prefetch("ab")
    assert bench.step() == []
    assert only(bench).status is EditStatus.REJECTED
    assert bench.state.slots.num_pinned == 0
    bench.pool.free_blocks(running)
    bench.check_idle()


def test_a_prefetch_goes_on_as_far_as_the_budget_allows() -> None:
    bench = Bench(budget=3)
    bench.put("abcdefg")
    bench.prefetch("abcdefg")
    assert bench.step() == ["load abc"]
    assert bench.step() == []
    bench.report()
    assert bench.in_gpu("abcdefg") == "abc"
    assert bench.step() == ["load def"]
    bench.report()
    assert bench.step() == ["load g"]
    bench.report()
    assert only(bench).blocks == BlockCounts(requested=7, done=7)
    bench.check_idle()


def test_what_was_loaded_first_is_not_displaced_by_what_is_loaded_last() -> None:
    bench = Bench(num_blocks=8, budget=3)
    bench.put("abcdefgh")
    bench.prefetch("abcdefgh")
    bench.run()
    assert bench.in_gpu("abcdefgh") == "abcdefgh"
    bench.check_idle()


def test_two_prefetches_of_the_same_blocks_load_them_once() -> None:
    bench = Bench()
    bench.put("abcd")
    bench.prefetch("abc")
    assert bench.step() == ["load abc"]
    bench.prefetch("abcd", session="t")
    assert bench.step() == ["load d"]
    first, second = bench.jobs
    bench.report(second)
    assert bench.ended() == {}
    bench.report(first)
    ended = bench.ended()
    assert ended["op-1"].blocks == BlockCounts(requested=3, done=3)
    assert ended["op-2"].blocks == BlockCounts(requested=4, done=1, already=3)
    assert bench.in_gpu("abcd") == "abcd"
    bench.check_idle()


def test_the_prefix_that_contexts_share_is_loaded_once() -> None:
    bench = Bench()
    bench.put("abcd")
    bench.put("abxy")
    bench.prefetch("abcd", "abxy")
    bench.run()
    handle = only(bench)
    assert handle.num_bytes == 6 * BLOCK_BYTES
    assert handle.status is EditStatus.COMPLETED
    assert bench.in_gpu("abcd") + bench.in_gpu("abxy") == "abcdabxy"
    assert bench.directory.restored == [("s", 1, "abcd"), ("s", 2, "abxy")]
    bench.check_idle()


def test_what_a_request_has_computed_meanwhile_is_kept() -> None:
    bench = Bench()
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    running = bench.compute("abc")
    bench.report()
    assert only(bench).status is EditStatus.COMPLETED
    found = [bench.state.gpu.find(c) for c in bench.state.slots.contents()]
    assert found == running
    bench.pool.free_blocks(running[::-1])
    bench.check_idle()
    hashed = [b for b in bench.pool.blocks if b.block_hash is not None]
    assert len(hashed) == 3


def test_a_prefetch_that_fails_leaves_no_trace_and_the_tier_forgets() -> None:
    """What cannot be read is not offered again."""
    bench = Bench()
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    bench.report(error="no")
    handle = only(bench)
    assert (handle.status, handle.reason) == (EditStatus.REJECTED, "rank 0: no")
    assert bench.in_gpu("abc") == bench.in_tier("abc") == ""
    assert bench.tier.stats()["failed_copies"] == 1
    bench.check_idle()


def test_a_prefetch_during_which_the_cache_is_reset_publishes_nothing() -> None:
    bench = Bench()
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    bench.tier.reset()
    bench.put("abc")  # of the time after
    bench.report()
    assert only(bench).reason == "the cache was reset"
    assert bench.in_gpu("abc") == ""
    assert bench.in_tier("abc") == "abc"
    bench.check_idle()


def test_slots_are_held_while_they_are_read() -> None:
    bench = Bench(num_slots=3)
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    bench.cache("xy")
    bench.offload("xy", session="t")
    assert bench.step() == []
    assert bench.in_tier("abc") == "abc"
    bench.report()
    assert bench.in_gpu("abc") == "abc"


def test_loads_go_before_stores() -> None:
    """Somebody is about to need them."""
    bench = Bench(budget=3)
    bench.cache("xyz")
    bench.put("abc")
    bench.offload("xyz", session="t")
    bench.prefetch("abc")
    assert bench.step() == ["load abc"]
    bench.report()
    assert bench.step() == ["store xyz"]


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


def test_a_prefetch_of_a_context_that_is_gone_restores_nothing() -> None:
    bench = Bench()
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    bench.directory.known.clear()
    bench.report()
    assert bench.directory.restored == [("s", 1, "")]
    bench.check_idle()
