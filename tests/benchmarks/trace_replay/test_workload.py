from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.demo.workload import SHARED_PREFIX_TOKENS, Next
from benchmarks.trace_replay.conversation import BLOCK_SIZE as CHAT_BLOCK
from benchmarks.trace_replay.conversation import read_conversation
from benchmarks.trace_replay.direct import INPUT_TOKENS, NUM_CONCURRENT, direct
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import ServiceModel
from benchmarks.trace_replay.server import VirtualServer
from benchmarks.trace_replay.workload import jittered
from tests.benchmarks.trace_replay.rows import BLOCK_SIZE, row, workload

pytestmark = pytest.mark.vllm


def test_growing_requests_share_one_context() -> None:
    turns = workload(row("a", 0, 1, 100), row("a", 2, 3, 130), row("a", 4, 5, 200))
    contexts = {id(turn.context) for turn in turns.turns}
    assert len(contexts) == 1
    assert len(turns.turns[0].context.token_ids) == 216


def test_a_side_call_has_content_of_its_own_and_the_main_one_goes_on() -> None:
    turns = workload(
        row("a", 0, 1, 1_000), row("a", 2, 3, 50), row("a", 4, 5, 1_100)
    ).turns
    assert turns[0].context is turns[2].context
    assert turns[1].context is not turns[0].context
    assert turns[1].next is Next.SIDE_CALL


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


def test_the_same_trace_has_the_same_content() -> None:
    one, two = (workload(row("a", 0, 1, 500)).turns[0].context for _ in range(2))
    assert one.block_hashes == two.block_hashes


def test_jitter_moves_the_starts_of_tasks_only() -> None:
    load = workload(row("a", 0, 1, 100), row("a", 2, 3, 200), row("b", 1, 6, 100))
    moved = jittered(load, 1)
    assert moved == jittered(load, 1) != jittered(load, 2)
    later = [t.session for t, o in zip(moved.turns, load.turns, strict=True) if t != o]
    assert later == ["a", "b"]


def chat(path: Path, *records: tuple[int, list[int]]) -> Path:
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "timestamp": 1_000 * i,
                    "input_length": length,
                    "output_length": 9,
                    "hash_ids": ids,
                }
            )
            for i, (length, ids) in enumerate(records)
        )
    )
    return path


def test_a_chat_goes_on_where_its_last_whole_block_is(tmp_path: Path) -> None:
    load = read_conversation(
        chat(
            tmp_path / "chat.jsonl",
            (1_100, [0, 1, 2]),
            (1_100, [0, 7, 8]),
            (2_100, [0, 1, 3, 4, 5]),  # goes on with the first
            (600, [0, 9]),  # has but the common beginning
            (700, [0, 10]),
            (3_000, [0, 1, 3, 4, 6, 11]),  # and on
        )
    )
    names = [turn.session for turn in load.turns]
    assert names == ["chat-0", "chat-1", "chat-0", "chat-3", "chat-4", "chat-0"]


def test_equal_ids_are_equal_content(tmp_path: Path) -> None:
    path = chat(tmp_path / "c.jsonl", (1_100, [0, 1, 2]), (1_600, [0, 1, 3, 4]))
    load = read_conversation(path)
    server = VirtualServer(
        load,
        pool_tokens=10 * CHAT_BLOCK,
        policy=Policy(),
        service=ServiceModel.instant(),
    )
    assert [one.cached_tokens for one in server.run().served] == [0, 1_024]


def test_the_direct_test_has_five_requests_at_a_time() -> None:
    load = direct(block_size=BLOCK_SIZE)
    free = [turn for turn in load.turns if not turn.wait_for]
    assert len(free) == NUM_CONCURRENT
    assert len(load.turns) == 20 * len(INPUT_TOKENS)
    last = [turn.next for turn in load.turns[-20:]]
    assert set(last) == {Next.END}
    assert load.turns[20].context is load.turns[0].context
