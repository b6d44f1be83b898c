from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.workload import SHARED_PREFIX_TOKENS, read_trace
from tests.benchmarks.trace_replay.rows import BLOCK_SIZE, row, workload

pytestmark = pytest.mark.vllm


def test_growing_requests_share_one_context() -> None:
    turns = workload(row("a", 0, 1, 100), row("a", 2, 3, 130), row("a", 4, 5, 200))
    contexts = {id(turn.context) for turn in turns.turns}
    assert len(contexts) == 1
    assert len(turns.turns[0].context.token_ids) == 216
    assert not any(turn.is_side_call for turn in turns.turns)


def test_shorter_request_opens_its_own_context_and_the_main_one_goes_on() -> None:
    turns = workload(
        row("a", 0, 1, 1_000), row("a", 2, 3, 50), row("a", 4, 5, 1_100)
    ).turns
    assert turns[0].context is turns[2].context
    assert turns[1].context is not turns[0].context
    assert [turn.is_side_call for turn in turns] == [False, True, False]


def test_overlapping_request_does_not_extend_a_running_one() -> None:
    turns = workload(row("a", 0, 9, 100), row("a", 1, 9, 1_000)).turns
    assert turns[0].context is not turns[1].context
    assert [turn.is_side_call for turn in turns] == [True, False]


def test_slightly_shorter_than_the_previous_total_still_extends() -> None:
    turns = workload(row("a", 0, 1, 100, 40), row("a", 2, 3, 130)).turns
    assert turns[0].context is turns[1].context


def test_siblings_share_their_first_tokens_and_no_more() -> None:
    size = SHARED_PREFIX_TOKENS + 500
    first, second, stranger = workload(
        row("a/1", 0, 1, size, parent="a"),
        row("a/2", 2, 3, size, parent="a"),
        row("b/1", 4, 5, size, parent="b"),
    ).turns
    ours, theirs = first.context.token_ids, second.context.token_ids
    assert ours[:SHARED_PREFIX_TOKENS] == theirs[:SHARED_PREFIX_TOKENS]
    assert ours[SHARED_PREFIX_TOKENS:] != theirs[SHARED_PREFIX_TOKENS:]
    num_shared = SHARED_PREFIX_TOKENS // BLOCK_SIZE
    assert (
        first.context.block_hashes[:num_shared]
        == (second.context.block_hashes[:num_shared])
    )
    assert first.context.block_hashes[0] != stranger.context.block_hashes[0]


def test_content_is_the_same_every_time() -> None:
    first, second = (workload(row("a", 0, 1, 100)).turns[0].context for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.block_hashes == second.block_hashes


def test_turn_follows_the_end_of_the_previous_one() -> None:
    turns = workload(row("a", 5, 6, 100), row("a", 8, 9, 200)).turns
    assert (turns[0].after, turns[0].offset_s) == (None, 5)
    assert (turns[1].after, turns[1].after_start, turns[1].offset_s) == (0, False, 2)


def test_overlapping_turn_follows_the_start_of_the_previous_one() -> None:
    turn = workload(row("a", 5, 9, 100), row("a", 6, 9, 200)).turns[1]
    assert (turn.after, turn.after_start, turn.offset_s) == (0, True, 1)


def test_sub_agent_follows_the_turn_that_spawned_it() -> None:
    turns = workload(
        row("a", 0, 1, 100),
        row("a", 2, 3, 200),
        row("a/1", 4, 5, 100, parent="a"),
        row("a", 9, 10, 300),
    ).turns
    assert (turns[2].after, turns[2].offset_s) == (1, 1)
    assert [turn.num_children for turn in turns] == [0, 1, 0, 0]
    assert {turn.task for turn in turns} == {"a"}


def test_ends_of_sessions_and_tasks() -> None:
    turns = workload(
        row("a", 0, 1, 100), row("a/1", 2, 3, 100, parent="a"), row("a", 4, 5, 200)
    ).turns
    assert [turn.ends_session for turn in turns] == [False, True, True]
    assert [turn.ends_task for turn in turns] == [False, False, True]


def test_followers_are_indexed_by_what_they_wait_for() -> None:
    load = workload(row("a", 0, 1, 100), row("a", 2, 3, 200))
    assert load.followers() == {0: [load.turns[1]]}


def test_trace_is_sorted_by_start(tmp_path: Path) -> None:
    lines = [
        {
            "session": name,
            "parent": None,
            "start_s": start,
            "end_s": 9.0,
            "input_tokens": 1,
            "output_tokens": 1,
        }
        for name, start in (("late", 2.0), ("early", 1.0))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert [r.session for r in read_trace(path)] == ["early", "late"]
