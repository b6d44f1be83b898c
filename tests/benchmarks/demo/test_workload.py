from __future__ import annotations

import pytest

from benchmarks.demo.workload import (
    Next,
    TraceRow,
    Workload,
    build_workload,
    load_trace,
    peak_live_tokens,
)


def row(
    session: str,
    start_s: float,
    end_s: float,
    input_tokens: int,
    *,
    parent: str | None = None,
    output_tokens: int = 16,
) -> TraceRow:
    return TraceRow(
        session=session,
        parent=parent,
        start_s=start_s,
        end_s=end_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def plan(trace: list[TraceRow], *, num_rows: int | None = None) -> Workload:
    return build_workload(
        trace,
        num_rows=len(trace) if num_rows is None else num_rows,
        token_divisor=1,
        gap_divisor=1.0,
        vocab_size=1024,
    )


LEAD_AND_CHILD = [
    row("a/lead", 0, 1, 9000),
    row("a/sub-1", 2, 3, 8500, parent="a/lead"),
    row("a/sub-1", 3.5, 5, 8900, parent="a/lead"),
    row("a/lead", 6, 7, 9600),
]


@pytest.fixture(scope="module")
def demo() -> Workload:
    return build_workload(
        load_trace(),
        num_rows=200,
        token_divisor=16,
        gap_divisor=10.0,
        vocab_size=1024,
    )


def test_a_turn_waits_for_the_turn_before_it_and_the_recorded_gap() -> None:
    turns = plan([row("a/lead", 0, 1, 100), row("a/lead", 1.5, 2, 200)]).turns
    assert turns[1].wait_for == (0,)
    assert turns[1].gap_s == 0.5


def test_a_child_starts_after_its_parents_turn() -> None:
    first_of_child = plan(LEAD_AND_CHILD).turns[1]
    assert first_of_child.wait_for == (0,)
    assert first_of_child.gap_s == 1.0


def test_a_lead_waits_for_its_children_not_for_the_recorded_time() -> None:
    resumed = plan(LEAD_AND_CHILD).turns[3]
    assert resumed.wait_for == (0, 1, 2)
    assert resumed.gap_s == 1.0


def test_what_the_harness_knows() -> None:
    turns = plan(LEAD_AND_CHILD).turns
    known = [turn.next for turn in turns]
    assert known == [Next.CHILDREN, Next.TOOL, Next.END, Next.END]


def test_an_agent_with_rows_beyond_the_replay_has_not_ended() -> None:
    turns = plan(LEAD_AND_CHILD, num_rows=2).turns
    assert [turn.next for turn in turns] == [Next.CHILDREN, Next.TOOL]


def test_a_new_task_starts_after_the_one_that_made_room() -> None:
    trace = [
        row("a/lead", 0, 1, 100),
        row("b/lead", 0.5, 9, 100),
        row("c/lead", 3, 4, 100),
    ]
    turns = plan(trace).turns
    assert (turns[1].wait_for, turns[1].gap_s) == ((), 0.5)
    assert (turns[2].wait_for, turns[2].gap_s) == ((0,), 2.0)


def test_the_smaller_of_two_overlapping_calls_is_a_side_call() -> None:
    turns = plan([row("a/lead", 0, 5, 100), row("a/lead", 1, 6, 900)]).turns
    assert [turn.next for turn in turns] == [Next.SIDE_CALL, Next.END]
    assert turns[1].follows_start_of == 0
    assert turns[1].gap_s == 1.0


def test_a_side_call_has_tokens_of_its_own_and_the_context_goes_on() -> None:
    trace = [
        row("a/lead", 0, 1, 100),
        row("a/lead", 2, 3, 20),
        row("a/lead", 4, 5, 120),
    ]
    workload = plan(trace)
    first, side, third = (workload.prompt(turn) for turn in workload.turns)
    assert first == third[:100]
    assert side[:8] != first[:8]
    assert [turn.seen_tokens for turn in workload.turns] == [0, 0, 100]


def test_children_of_one_task_share_their_first_tokens_only() -> None:
    trace = [
        row("a/lead", 0, 1, 100),
        row("a/sub-1", 2, 3, 8100, parent="a/lead"),
        row("a/sub-2", 4, 5, 8200, parent="a/lead"),
        row("b/sub-1", 6, 7, 8100, parent="b/lead"),
    ]
    workload = plan(trace)
    _, one, two, other = (workload.prompt(turn) for turn in workload.turns)
    assert one[:8000] == two[:8000]
    assert one[8000:8016] != two[8000:8016]
    assert one[:16] != other[:16]
    assert [turn.seen_tokens for turn in workload.turns] == [0, 0, 8000, 0]


def test_peak_live_counts_an_agent_until_its_last_end() -> None:
    assert peak_live_tokens(LEAD_AND_CHILD, frozenset()) == 9000 + 8900
    assert peak_live_tokens(LEAD_AND_CHILD, frozenset({2})) == 9000 + 8500


def test_the_demo_is_two_hundred_requests(demo: Workload) -> None:
    assert len(demo.turns) == 200
    assert sum(turn.next is Next.END for turn in demo.turns) == 8
    assert sum(turn.next is Next.SIDE_CALL for turn in demo.turns) == 5


def test_every_turn_waits_for_earlier_turns_only(demo: Workload) -> None:
    for turn in demo.turns:
        assert all(index < turn.index for index in turn.wait_for)
        assert turn.gap_s >= 0
        if turn.follows_start_of is not None:
            assert turn.follows_start_of < turn.index


def test_seen_tokens_are_a_real_common_prefix(demo: Workload) -> None:
    earlier: list[list[int]] = []
    for turn in demo.turns[:60]:
        prompt = demo.prompt(turn)
        assert len(prompt) == turn.num_prompt_tokens
        seen = turn.seen_tokens
        assert not seen or any(other[:seen] == prompt[:seen] for other in earlier)
        earlier.append(prompt)


def test_prompts_are_the_same_every_time(demo: Workload) -> None:
    turn = demo.turns[100]
    assert demo.prompt(turn) == demo.prompt(turn)
    assert set(demo.prompt(turn)) <= set(range(8, 1024))
