"""Prefetch, copy by copy; when it is cancelled: ``test_operations``."""

from __future__ import annotations

import pytest

from sam_connector.core.tiers import OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus, Zone
from tests.connector.tier.bench import BLOCK_BYTES, Bench

pytestmark = pytest.mark.vllm


def only(bench: Bench) -> OperationHandle:
    """How the one operation ended."""
    ended = bench.ended()
    assert len(ended) == 1, ended
    return next(iter(ended.values()))


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


def test_a_prefetch_of_a_context_that_is_gone_restores_nothing() -> None:
    bench = Bench()
    bench.put("abc")
    bench.prefetch("abc")
    bench.step()
    bench.directory.known.clear()
    bench.report()
    assert bench.directory.restored == [("s", 1, "")]
    bench.check_idle()
