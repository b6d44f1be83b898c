from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks.no_hint_overhead.running import (
    ARMS,
    STEPS_PER_TURN,
    LongRunners,
    Shape,
    _check_running,
    _contents,
    measure_running,
)

pytestmark = pytest.mark.vllm

SMALL = Shape(num_requests=4, context_blocks=32, num_turns=2)


def runners(arm: str) -> LongRunners:
    connector, hinted = ARMS[arm]
    return LongRunners(connector, hinted=hinted, shape=SMALL, contents=_contents(SMALL))


@pytest.mark.parametrize("arm", ARMS)
def test_all_requests_decode_until_they_end_one_by_one(arm: str) -> None:
    run = runners(arm)
    run.admit()
    assert run.num_running == SMALL.num_requests
    assert run.decode(SMALL.num_turns * STEPS_PER_TURN) > 0
    for left in (3, 2, 1, 0):
        assert run.num_running == left + 1
        run.decode(1)
    assert run.num_running == 0
    run.close()


def test_each_request_fills_a_block_in_a_turn() -> None:
    run = runners("stock")
    run.admit()
    pool = run.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    run.decode(STEPS_PER_TURN)
    assert before - pool.get_num_free_blocks() == SMALL.num_requests


def test_hinted_requests_have_sessions_and_leases() -> None:
    run = runners("hints")
    run.admit()
    connector: Any = run.scheduler.connector
    stats = connector.scheduler_side.host.manager.stats()
    assert stats.sessions == stats.leases_granted == SMALL.num_requests
    assert stats.records == SMALL.num_requests * SMALL.context_blocks


def test_both_arms_of_ours_are_compared_with_stock() -> None:
    costs = measure_running(SMALL)
    assert set(costs) == {"no_hints", "hints"}
    for cost in costs.values():
        assert cost.step.median > 0
        assert cost.finish.median > 0
        assert cost.admit > 0
        assert cost.stock_step_us > 0


def test_requests_that_ended_too_early_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="0 requests run, not 4"):
        _check_running(runners("stock"), 4)
