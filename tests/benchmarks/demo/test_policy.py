from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.demo.policy import after_turn, request_hint, session_id
from benchmarks.demo.server import demo_workload
from benchmarks.demo.workload import Next, Turn
from sam_connector.protocol.agent_hint import parse_session_id


@pytest.fixture
def turn() -> Turn:
    return demo_workload(num_rows=30).turns[20]


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
    assert request_hint(replace(turn, next=Next.SIDE_CALL), "demo") is None


def test_the_end_of_an_agent_evicts_it(turn: Turn) -> None:
    call = after_turn(replace(turn, next=Next.END), "demo")
    assert call is not None
    assert call.body == {"edits": [{"type": "evict"}]}


def test_a_running_tool_needs_no_further_call(turn: Turn) -> None:
    assert after_turn(replace(turn, next=Next.TOOL), "demo") is None
