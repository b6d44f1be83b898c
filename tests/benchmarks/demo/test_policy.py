from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.demo.policy import (
    AgentPolicy,
    ControlCall,
    after_turn,
    before_resuming,
    request_hint,
    resumptions,
    session_id,
)
from benchmarks.demo.server import demo_workload
from benchmarks.demo.workload import Next, Turn
from sam_connector.protocol.agent_hint import parse_edits, parse_session_id, parse_ttl
from tests.benchmarks.demo.fake_server import LEAD_AND_CHILDREN, plan, row


@pytest.fixture
def turn() -> Turn:
    return demo_workload(num_rows=30).turns[20]


def edit_of(call: ControlCall) -> str:
    assert call.method == "POST"
    assert call.path.endswith("/edits")
    assert call.body is not None
    (edit,) = parse_edits(call.body["edits"])
    return edit.type.value


def test_ids_are_valid_and_apart_for_two_passes() -> None:
    one, two = session_id("session-0/lead", "demo"), session_id("session-0/lead", "x")
    assert one != two
    assert parse_session_id(one, field="session_id") == one
    assert "/" not in one


def test_a_child_names_its_parent_and_asks_for_a_lease(turn: Turn) -> None:
    hint = request_hint(turn, "demo")
    assert hint is not None
    assert hint["parent_session_id"] == session_id(turn.parent or "", "demo")
    assert hint["cache_control"]


def test_a_side_call_says_nothing(turn: Turn) -> None:
    side = replace(turn, next=Next.SIDE_CALL)
    assert request_hint(side, "demo") is None
    assert after_turn(side, "demo") == ()


def test_the_end_of_an_agent_evicts_it(turn: Turn) -> None:
    (call,) = after_turn(replace(turn, next=Next.END), "demo")
    assert edit_of(call) == "evict"


def test_a_lead_that_waits_gives_its_lease_up_and_is_then_offloaded(
    turn: Turn,
) -> None:
    lease, offload = after_turn(replace(turn, next=Next.CHILDREN), "demo")
    assert lease.method == "PUT"
    assert lease.path.endswith(f"/{session_id(turn.session, 'demo')}/lease")
    assert lease.body is not None
    assert parse_ttl(lease.body["ttl"]) == 0
    assert edit_of(offload) == "offload"


def test_a_running_tool_needs_no_further_call(turn: Turn) -> None:
    assert after_turn(replace(turn, next=Next.TOOL), "demo") == ()


def test_a_lead_is_prefetched_before_it_resumes(turn: Turn) -> None:
    assert edit_of(before_resuming(turn, "demo")) == "prefetch"


def test_a_lead_resumes_once_with_its_turn_after_the_children() -> None:
    assert resumptions(plan(LEAD_AND_CHILDREN).turns) == {4: 0}


def test_a_side_call_between_neither_resumes_nor_ends_the_waiting() -> None:
    rows = [*LEAD_AND_CHILDREN[:4], row("a/lead", 6.2, 6.4, 10)]
    turns = plan([*rows, *LEAD_AND_CHILDREN[4:]]).turns
    assert turns[4].next is Next.SIDE_CALL
    assert resumptions(turns) == {5: 0}


def test_every_resumption_of_the_demo_waits_for_a_child_that_ends() -> None:
    turns = demo_workload().turns
    found = resumptions(turns)
    assert len(found) == 7
    for resumed, since in found.items():
        lead = turns[resumed].session
        assert turns[since].session == lead
        assert turns[since].next is Next.CHILDREN
        later = [i for i in turns[resumed].wait_for if i > since]
        assert {turns[i].parent for i in later} == {lead}
        assert Next.END in {turns[i].next for i in later}


def test_one_pass_says_the_same_in_the_same_order() -> None:
    workload = plan(LEAD_AND_CHILDREN)
    policy = AgentPolicy(workload.turns, "r")
    lead, resumed = workload.turns[0], workload.turns[4]
    assert policy.hint(lead) == request_hint(lead, "r")
    assert policy.before_turn(lead) == ()
    assert policy.before_turn(resumed) == (before_resuming(resumed, "r"),)
    assert policy.after_turn(lead) == after_turn(lead, "r") != ()
