from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.no_hint_overhead.measure import ARMS, measure_mix
from benchmarks.no_hint_overhead.mix import (
    Arm,
    MixRun,
    MixShape,
    agent_hint,
    build,
    no_hint,
    plan,
)
from benchmarks.scheduler_harness import expected_output

pytestmark = pytest.mark.vllm

SMALL = MixShape(
    num_agents=4,
    num_turns=2,
    first_prompt=(40, 80),
    new_input=(10, 20),
    output=(2, 5),
    num_blocks=64,
    max_running=4,
)


def test_contexts_grow_by_what_will_be_answered() -> None:
    first, second = plan(SMALL)
    for before, after in zip(first, second, strict=True):
        answer = expected_output(
            before.request_id, len(before.prompt_token_ids), before.max_tokens
        )
        kept = [*before.prompt_token_ids, *answer]
        assert after.prompt_token_ids[: len(kept)] == kept
        assert len(after.prompt_token_ids) > len(kept)
        assert after.session_id == before.session_id


def test_arms_differ_in_hints_only() -> None:
    rounds = plan(SMALL)
    assert rounds == plan(SMALL)
    bare, hinted = build(rounds, no_hint), build(rounds, agent_hint)
    for a, b in zip(bare[1], hinted[1], strict=True):
        assert a.prompt_token_ids == b.prompt_token_ids
        assert a.block_hashes == b.block_hashes
        assert a.kv_transfer_params is None
        assert b.kv_transfer_params is not None
        assert "agent_hint" in b.kv_transfer_params


def test_hints_of_an_agents_life() -> None:
    first, last = (turns[1] for turns in plan(SMALL))
    assert agent_hint(first) == {
        "session_id": "agent-1",
        "parent_session_id": "agent-0",
        "cache_control": {"ttl": 60.0},
    }
    assert agent_hint(last)["context_management"] == {"edits": [{"type": "evict"}]}


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_each_arm_serves_the_mix_and_leaks_nothing(arm: Arm) -> None:
    rounds = plan(SMALL)
    run = MixRun(SMALL, rounds, arm)
    for _ in rounds:
        run.serve_round()
    assert run.close() > 0


def test_every_pair_times_every_arm() -> None:
    notes: list[str] = []
    times_s = measure_mix(SMALL, 2, note=notes.append)
    assert set(times_s) == set(ARMS)
    assert all(len(times) == 2 for times in times_s.values())
    assert notes == ["warm-up", "pair 1 of 2", "pair 2 of 2"]
