from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.hints import (
    Call,
    Harness,
    HintRules,
    Pauses,
    wrong_sessions,
)
from sam_connector.core.types import EditType
from tests.benchmarks.trace_replay.rows import BLOCK_SIZE, ring, row, workload

pytestmark = pytest.mark.vllm

FAMILY = workload(
    row("a", 0, 1, 100),
    row("a/1", 2, 3, 8_500, parent="a"),
    row("a", 9, 10, 300),
    row("a", 11, 12, 400),
)


def kinds(calls: Iterable[Call]) -> list[tuple[str, str | None]]:
    return [(c.session, None if c.edit is None else c.edit.value) for c in calls]


def test_every_turn_names_its_session_and_asks_for_retention() -> None:
    harness = Harness(HintRules(tool_ttl_s=9.0), FAMILY)
    lead, child, *_ = FAMILY.turns
    assert harness.hint(lead) == {"session_id": "a", "cache_control": {"ttl": 9.0}}
    hint = harness.hint(child)
    assert hint is not None
    assert hint["parent_session_id"] == "a"


def test_side_call_names_a_session_only_if_told_to() -> None:
    load = workload(row("a", 0, 9, 1_000), row("a", 1, 9, 100))
    assert Harness(HintRules(), load).hint(load.turns[1]) is None
    rules = HintRules(name_side_calls=True, tool_ttl_s=None)
    assert Harness(rules, load).hint(load.turns[1]) == {"session_id": "a"}


def test_session_ids_alone_say_nothing_else() -> None:
    harness = Harness(HintRules.session_ids(), FAMILY)
    assert harness.hint(FAMILY.turns[0]) == {"session_id": "a"}
    assert [c for t in FAMILY.turns for c in harness.on_answer(t, 0.0)] == []


def test_a_lead_that_waits_is_offloaded_and_prefetched_when_its_child_ends() -> None:
    harness = Harness(HintRules(offload_waiting=True), FAMILY)
    lead, _, again, last = FAMILY.turns
    assert kinds(harness.on_answer(lead, 1.0)) == [("a", None), ("a", "offload")]
    assert kinds(harness.on_ready(again)) == [("a", "prefetch")]
    assert kinds(harness.on_ready(last)) == []


def test_a_finished_child_leaves_what_its_siblings_begin_with() -> None:
    harness = Harness(HintRules(), FAMILY)
    _, child, _, last = FAMILY.turns
    evict, lease = harness.on_answer(child, 3.0)
    assert evict.edit is EditType.EVICT
    assert evict.block_start == 8_000 // BLOCK_SIZE
    assert evict.block_end == (8_500 + 16 - 1) // BLOCK_SIZE
    assert (lease.edit, lease.ttl_s) == (None, 0.0)
    # With the lead goes what was left.
    assert kinds(harness.on_answer(last, 12.0)) == [("a/1", "evict"), ("a", "evict")]


def test_a_harness_may_keep_no_template() -> None:
    harness = Harness(HintRules(keep_template=False), FAMILY)
    assert kinds(harness.on_answer(FAMILY.turns[1], 3.0)) == [("a/1", "evict")]


def test_what_is_expected_is_what_it_took_so_far() -> None:
    pauses = Pauses(default_s=7.0)
    assert pauses.expected_s("a") == 7.0
    for start_s, end_s in ((0.0, 2.0), (10.0, 14.0)):
        pauses.begin("a", start_s)
        pauses.end("a", end_s)
    pauses.end("a", 99.0)
    assert (pauses.expected_s("a"), pauses.expected_s("b")) == (3.0, 3.0)


def test_agents_say_when_they_expect_to_be_back() -> None:
    harness = Harness(HintRules(expect_resume=True), FAMILY)
    first, _, again, last = FAMILY.turns
    hint = harness.hint(again)
    assert hint is not None
    assert hint["expected_resume_s"] == 5.0
    list(harness.on_answer(again, 10.0))
    harness.on_arrival(last, 11.5)
    hint = harness.hint(last)
    assert hint is not None
    assert hint["expected_resume_s"] == 1.5
    lease = next(iter(harness.on_answer(first, 20.0)))
    assert lease.expected_resume_s == 120.0


def test_one_session_in_five_is_wrong_and_the_others_are_not() -> None:
    load = ring(10, 8, first_tokens=100)
    wrong = wrong_sessions(load, 0.2)
    assert len(wrong) == 2
    harness = Harness(HintRules(wrong_share=0.2), load)
    right = Harness(HintRules(), load)
    ttls, edits = set(), []
    for turn in load.turns:
        hint, calls = harness.hint(turn), list(harness.on_ready(turn))
        calls += harness.on_answer(turn, 0.0)
        if turn.session in wrong:
            assert hint is not None
            ttls.add(hint["cache_control"]["ttl"])
            edits += [call.edit for call in calls]
        else:
            assert hint == right.hint(turn)
    assert len(ttls) == 16
    assert {EditType.EVICT, EditType.PREFETCH} == set(edits)
