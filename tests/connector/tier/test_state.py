"""What the parts of the tier share: stores, the budget, and who holds what."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.connector.tier.jobs import Job
from sam_connector.connector.tier.session_directory import NoSessions
from sam_connector.core.types import Zone
from sam_connector.transfer.contract import Direction
from tests.connector.tier.bench import BLOCK_BYTES, Bench, described
from tests.core.builders import key
from tests.core.slots import blocks_of, contents

pytestmark = pytest.mark.vllm


def store(bench: Bench, text: str, **more: Any) -> tuple[Job | None, int]:
    """The job and how many blocks it copies."""
    sources = [(c, bench.state.gpu.find(c)) for c in contents(text)]
    job = bench.state.store(sources, **more)
    return job, 0 if job is None else len(job.copies)


def test_what_is_copied_is_held_on_both_sides_until_the_copy_has_ended() -> None:
    bench = Bench()
    blocks = bench.cache("abc")
    job, num_stored = store(bench, "abc")
    assert job is not None
    assert (described(job), num_stored) == ("store abc", 3)
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert (bench.state.gpu.num_pins, bench.state.slots.num_pinned) == (3, 3)
    assert bench.in_tier("abc") == ""  # not before it is there
    bench.step()
    bench.report()
    assert bench.in_tier("abc") == "abc"
    bench.check_idle()


def test_as_much_is_stored_as_there_is_room_for_from_the_front() -> None:
    bench = Bench(num_slots=2)
    bench.cache("abcd")
    job, num_stored = store(bench, "abcd")
    assert job is not None
    assert (described(job), num_stored) == ("store ab", 2)
    assert store(bench, "cd") == (None, 0)
    assert bench.state.gpu.num_pins == 2


def test_a_store_breaks_no_lease_in_the_tier() -> None:
    bench = Bench(num_slots=4)
    bench.put("xyz")
    bench.state.contexts.keep(key("t"), blocks_of("xyz", 9, deadline=9.0))
    bench.cache("abc")
    job, num_stored = store(bench, "abc")
    assert job is not None
    assert num_stored == 1
    assert bench.in_tier("xyz") == "xyz"


def test_a_store_takes_the_place_of_what_is_merely_held() -> None:
    bench = Bench(num_slots=3)
    bench.put("xyz")
    bench.state.contexts.keep(key("t"), blocks_of("xyz", 9))
    bench.cache("ab")
    assert store(bench, "ab")[1] == 2
    assert bench.in_tier("xyz") == "x"
    assert bench.state.slots.num_displaced == 2


def test_the_budget_is_what_jobs_do_not_hold() -> None:
    bench = Bench(budget=5)
    bench.cache("abc")
    store(bench, "abc")
    assert (bench.state.jobs.num_blocks, bench.state.budget) == (3, 2)
    bench.step()
    bench.report()
    assert bench.state.budget == 5


def test_blocks_that_a_request_loads_into_are_its_own() -> None:
    bench = Bench(budget=5)
    bench.put("ab")
    job = bench.state.jobs.start(Direction.LOAD, (), generation=0, request_id="r")
    assert bench.state.budget == 5
    assert job.request_id == "r"


def test_content_is_wanted_unless_it_is_there_or_on_its_way() -> None:
    bench = Bench()
    bench.put("a")
    bench.cache("xy")
    store(bench, "xy")
    wanted = [bench.state.is_wanted(c) for c in contents("ab") + contents("xyz")]
    assert wanted == [False, True, False, False, True]


def test_a_context_that_is_forgotten_meanwhile_holds_nothing() -> None:
    bench = Bench()
    bench.put("ab")
    bench.know("ab")
    bench.state.keep([(key("s"), 1), (key("s"), 2)])
    assert bench.state.contexts.num_held(key("s")) == 2
    assert len(bench.state.contexts) == 1


def test_bytes_are_those_of_all_ranks() -> None:
    bench = Bench()
    bench.cache("abc")
    job, _ = store(bench, "abc")
    assert job is not None
    assert bench.state.num_bytes(job.copies) == 3 * BLOCK_BYTES


def test_without_session_hints_there_is_nobody_to_ask() -> None:
    nobody = NoSessions()
    assert nobody.contents(key("s"), 1) is None
    nobody.restore(key("s"), 1, None)


def test_a_claim_of_a_session_in_the_engine_does_not_keep_a_block_from_a_copy() -> None:
    bench = Bench()
    bench.cache("ab")
    bench.claim("ab", Zone.C)
    store(bench, "ab")
    bench.step()
    bench.report()
    assert bench.adapter.free_queue.num_unleased(99) == 14  # still leased
    bench.check_idle()
