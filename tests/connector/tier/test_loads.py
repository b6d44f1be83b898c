"""External hits: how much is promised, and that the promise is kept or called off."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.core.types import GroupId
from sam_connector.transfer.contract import Direction
from tests.connector.tier.bench import BLOCK_SIZE, Bench, FakeChains, request
from tests.core.builders import G0
from tests.core.slots import contents

pytestmark = pytest.mark.vllm


def matched(bench: Bench, asked: Any, num_local: int = 0) -> int | None:
    """Blocks that the tier adds to a local hit of so many."""
    tokens = bench.tier.num_new_matched_tokens(asked, num_local * BLOCK_SIZE)
    if tokens is None:
        return None
    assert tokens % BLOCK_SIZE == 0
    return tokens // BLOCK_SIZE


def load(bench: Bench, asked: Any, num_local: int, num_external: int) -> list[Any]:
    """vLLM allocates blocks and promises the request what the tier has."""
    blocks: list[Any] = bench.pool.get_new_blocks(num_local + num_external)
    ids = [block.block_id for block in blocks]
    bench.tier.start_load(asked, [ids], num_external * BLOCK_SIZE)
    return blocks


@pytest.mark.parametrize(
    ("in_tier", "prompt", "num_local", "extra", "expected"),
    [
        ("abc", "abcd", 0, 1, 3),
        ("abc", "abcd", 1, 1, 2),
        ("abc", "abcd", 3, 1, 0),
        ("ab", "abcd", 3, 1, 0),  # less than the engine itself has
        ("abcd", "abcd", 0, 1, 4),
        ("abcd", "abcd", 0, 0, 3),  # a token must be left to compute
        ("abcd", "abcd", 3, 0, 0),
        ("abcd", "abcd", 4, 0, 0),
        ("abcd", "abxd", 0, 1, 2),
        ("", "abcd", 0, 1, 0),
        ("a", "a", 0, 0, 0),
        ("a", "", 0, 1, 0),
        ("a", "", 0, 15, 0),
    ],
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(
    in_tier: str, prompt: str, num_local: int, extra: int, expected: int
) -> None:
    bench = Bench()
    bench.put(in_tier)
    asked = request(prompt, extra_tokens=extra)
    assert matched(bench, asked, num_local) == expected


def test_a_hit_ends_at_the_first_gap() -> None:
    bench = Bench()
    bench.put("abcde")
    bench.state.slots.forget(contents("abc")[2])
    assert matched(bench, request("abcdef")) == 2
    assert matched(bench, request("abcdef"), 3) == 2


def test_to_look_changes_nothing() -> None:
    bench = Bench()
    bench.put("abc")
    asked = request("abcd")
    before = bench.tier.stats()
    assert [matched(bench, asked) for _ in range(50)] == [3] * 50
    assert bench.tier.stats() == before
    assert bench.step() == []


def test_a_request_that_must_not_read_a_cache_is_not_served() -> None:
    bench = Bench()
    bench.put("abc")
    asked = request("abcd")
    asked.skip_reading_prefix_cache = True
    assert matched(bench, asked) == 0


def test_every_group_must_have_what_is_promised() -> None:
    other = GroupId(1)
    bench = Bench(groups=(G0, other))
    bench.put("abcd")
    assert matched(bench, request("abcde")) == 0
    slots = bench.state.slots
    taken = slots.allocate(2)
    for slot, content in zip(taken, contents("ab", other), strict=True):
        slots.publish(slot, content)
    slots.unpin(taken)
    assert matched(bench, request("abcde")) == 2


def test_groups_of_different_block_sizes_agree_on_whole_blocks() -> None:
    bench = Bench(num_slots=32)
    chains: Any = FakeChains((G0, GroupId(1)))
    chains.block_sizes[GroupId(1)] = 3 * BLOCK_SIZE
    bench.tier._loads.__init__(bench.state, chains)  # type: ignore[misc]
    bench.put("abcdefgh")
    slots = bench.state.slots
    taken = slots.allocate(2)
    for slot, content in zip(taken, contents("ab", GroupId(1)), strict=True):
        slots.publish(slot, content)
    slots.unpin(taken)
    assert matched(bench, request("abcdefgh")) == 6


# --- loads ------------------------------------------------------------------


def test_a_load_fills_the_last_blocks_that_were_allocated() -> None:
    bench = Bench()
    bench.put("abcd")
    blocks = load(bench, request("abcde"), 1, 3)
    assert bench.step() == ["load bcd"]
    (job,) = bench.jobs
    assert job.blocks == blocks[1:]
    assert job.request_id == "r"
    # They are the request's own: we hold only the slots.
    assert (bench.state.gpu.num_pins, bench.state.slots.num_pinned) == (0, 3)
    assert bench.state.budget == 64
    bench.report()
    stats = bench.tier.stats()
    assert stats["host_pinned_slots"] == 0
    assert (stats["external_hit_requests"], stats["external_hit_tokens"]) == (1, 48)
    bench.pool.free_blocks(blocks)
    bench.check_idle()


def test_slots_are_held_while_a_request_reads_them() -> None:
    bench = Bench(num_slots=3)
    bench.put("abc")
    load(bench, request("abcd"), 0, 3)
    assert bench.state.slots.num_available(9) == 0
    bench.step()
    bench.report()
    assert bench.state.slots.num_available(9) == 3
    assert bench.in_tier("abc") == "abc"


def test_what_follows_from_the_allocation_is_loaded_whatever_was_said_before() -> None:
    bench = Bench()
    bench.put("abcd")
    asked = request("abcde")
    assert matched(bench, asked) == 4
    load(bench, asked, 2, 1)
    assert bench.step() == ["load c"]


def test_a_load_that_failed_is_not_offered_again() -> None:
    """vLLM asks once more for the same request: the same answer would never end."""
    bench = Bench()
    bench.put("abc")
    asked = request("abcd")
    load(bench, asked, 0, 2)
    bench.step()
    bench.report(error="no")
    assert matched(bench, asked) == 0
    assert bench.in_tier("abc") == "c"
    bench.put("abc")
    assert matched(bench, asked) == 0
    assert matched(bench, request("abcd", "other")) == 3
    bench.finish(asked)
    assert matched(bench, request("abcd", "r")) == 3  # the id, used anew


def test_a_request_that_was_aborted_before_its_load_failed_is_forgotten() -> None:
    bench = Bench()
    bench.put("abc")
    asked = request("abcd")
    load(bench, asked, 0, 2)
    bench.step()
    bench.tier.on_request_finished(asked, [[]])
    bench.report(error="no")
    bench.put("abc")
    assert matched(bench, request("abcd", "r")) == 3


def test_a_promise_that_cannot_be_kept_is_a_load_that_fails() -> None:
    """The content was lost between the look-up and the allocation."""
    bench = Bench()
    bench.put("abc")
    asked = request("abcd")
    assert matched(bench, asked) == 3
    bench.state.slots.forget(contents("ab")[1])
    load(bench, asked, 0, 3)
    (sent,) = bench.tier.on_step().jobs
    assert sent.parts[0].group_id == -1  # which every rank refuses
    bench.check()
    assert bench.state.slots.num_pinned == 0
    bench.report(error="no such group")
    assert matched(bench, asked) == 0
    assert bench.in_tier("abc") == "ac"


def test_a_request_is_told_of_one_end_however_often_it_is_given_up() -> None:
    bench = Bench()
    bench.put("abc")
    load(bench, request("abcd"), 0, 3)
    bench.tier.fail_load("r")
    assert [job.request_id for job in bench.jobs] == ["r"]
    bench.tier.fail_load("other")
    bench.tier.fail_load("other")
    assert [job.request_id for job in bench.jobs] == ["r", "other"]


# --- what is on its way already ----------------------------------------------


def test_a_request_waits_for_blocks_that_are_being_loaded() -> None:
    bench = Bench()
    bench.put("abcd")
    bench.prefetch("abcd")
    bench.step()
    asked = request("abcde")
    assert matched(bench, asked) is None
    bench.report()
    assert bench.in_gpu("abcd") == "abcd"
    assert matched(bench, asked, 4) == 0


def test_it_waits_for_those_of_another_request_as_well() -> None:
    bench = Bench()
    bench.put("abcd")
    load(bench, request("abcde"), 0, 4)
    assert matched(bench, request("abx", "other")) is None
    assert matched(bench, request("xyz", "stranger")) == 0


def test_it_waits_up_to_a_deadline_and_then_loads_by_itself() -> None:
    bench = Bench()
    bench.put("abcd")
    bench.prefetch("abcd")
    bench.step()
    asked = request("abcde")
    bench.clock.advance(0.99)
    assert matched(bench, asked) is None
    bench.clock.advance(0.01)
    assert matched(bench, asked) == 4


def test_a_load_of_what_comes_later_is_waited_for() -> None:
    bench = Bench()
    bench.put("abcd")
    bench.cache("ab")
    bench.prefetch("abcd")
    assert bench.step() == ["load cd"]
    assert matched(bench, request("abcde"), 2) is None
    assert matched(bench, request("abx", "other"), 2) == 0


def test_a_store_is_not_waited_for() -> None:
    bench = Bench()
    bench.cache("abc")
    bench.offload("abc")
    bench.step()
    assert bench.jobs[0].direction is Direction.STORE
    assert matched(bench, request("abcd")) == 0
