"""One real server, right hints and wrong ones."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.agent_serving.__main__ import MIN_ROWS, arms, drive
from benchmarks.agent_serving.comparison import compare
from benchmarks.agent_serving.scenario import scenario
from benchmarks.agent_serving.wrong_hints import wrong_sessions
from benchmarks.demo.model import ensure_model
from benchmarks.demo.server import ServerKind, make_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

HINTS, WRONG = ServerKind.HINTS, ServerKind.WRONG


def test_right_and_wrong_hints_on_a_real_server() -> None:
    planned = scenario(MIN_ROWS)
    driven = {kind: arms(seed=0)[kind] for kind in (HINTS, WRONG)}
    with make_server(
        ensure_model(),
        planned.workload,
        planned.pool_blocks + 1,
        kind=HINTS,
        host_bytes=planned.host_bytes,
    ) as server:
        # Both are the same server; every pass empties it.
        servers = dict.fromkeys(driven, server)
        outcome = asyncio.run(drive(servers, planned, driven, 1))
    compared = compare(
        outcome.record,
        planned.workload,
        num_blocks=planned.pool_blocks,
        wrong_sessions=wrong_sessions(planned.workload.turns, 0),
    )
    for kind in driven:
        (run,) = compared.pool.runs[kind]
        assert run.requests == MIN_ROWS
        assert 0 < run.ttft_mean_s < run.e2e_mean_s
        assert run.tpot_mean_s > 0
        assert 0.3 < run.cached_rate < 1
        assert run.bytes_moved > 0
    assert compared.control_calls[HINTS]["offload/accepted"] > 0
    # A session that evicts itself and goes on is computed again.
    assert compared.control_calls[WRONG]["evict/completed"] > 0
    (right,), (wrong,) = compared.wrong[HINTS], compared.wrong[WRONG]
    assert wrong.requests == right.requests
    assert wrong.uncached_tokens > right.uncached_tokens
    assert outcome.rates.prefill_tokens_per_s > 0
    assert outcome.version.startswith("0.")
