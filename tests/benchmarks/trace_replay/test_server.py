from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import Replay, ServiceModel
from benchmarks.trace_replay.server import VirtualServer
from benchmarks.trace_replay.workload import TraceRow
from tests.benchmarks.trace_replay.rows import row, workload

pytestmark = pytest.mark.vllm

#: One second per 1,000 tokens of prefill, one second per decode step.
SERVICE = ServiceModel(
    prefill_tokens_per_s=1_000.0, decode_step_s=1.0, growth_tokens=32
)


def replay(pool_tokens: int, *rows: TraceRow) -> Replay:
    server = VirtualServer(
        workload(*rows), pool_tokens=pool_tokens, policy=Policy(), service=SERVICE
    )
    result = server.run()
    assert server.manager.usage == 0
    return result


def test_cold_request_is_prefilled_whole() -> None:
    (served,) = replay(4_096, row("a", 3, 4, 1_000, 5)).served
    assert (served.arrival_s, served.first_token_s, served.end_s) == (3, 4, 8)
    assert (served.cached_tokens, served.recomputed_tokens) == (0, 0)


def test_next_turn_hits_input_and_output_but_for_the_last_token() -> None:
    result = replay(4_096, row("a", 0, 1, 1_000, 24), row("a", 3, 4, 1_100))
    # 1,023 tokens have KV: 63 whole blocks.
    assert result.served[1].cached_tokens == 1_008


def test_prefills_queue_and_decodes_do_not() -> None:
    first, second = replay(
        8_192, row("a", 0, 1, 1_000, 50), row("b", 0.5, 1, 2_000, 1)
    ).served
    assert (first.first_token_s, second.first_token_s) == (1, 3)
    assert second.end_s == 3


def test_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    big, waits, small = replay(
        2_048,
        row("a", 0, 1, 1_500, 11),
        row("b", 1, 2, 1_500, 1),
        row("c", 2, 3, 100, 1),
    ).served
    assert big.end_s == 11.5
    assert waits.admitted_s == small.admitted_s == 11.5
    assert waits.arrival_s == 1


def test_evicted_content_is_counted_as_recomputed() -> None:
    result = replay(
        2_048,
        row("a", 0, 1, 1_600, 1),
        row("b", 3, 4, 1_600, 1),
        row("a", 9, 10, 1_700),
    )
    again = result.served[2]
    # Blocks are taken tail first, so some of the prefix was still there.
    assert 0 < again.cached_tokens < 1_600
    assert again.cached_tokens + again.recomputed_tokens == 1_600
    assert result.served[1].recomputed_tokens == 0


def test_gap_counts_from_the_end_in_virtual_time() -> None:
    slow, following = replay(
        4_096, row("a", 0, 1, 3_000, 5), row("a", 3, 4, 3_100, 1)
    ).served
    assert slow.end_s == 7
    assert following.arrival_s == 9


def test_output_grows_and_preempts_the_latest_admission() -> None:
    result = replay(640, row("a", 0, 1, 256, 200), row("b", 1, 2, 256, 190))
    assert result.num_preemptions > 0
    first, second = result.served
    assert first.end_s < second.end_s
    assert second.first_token_s < first.end_s
    assert result.use_peak <= 1.0


def test_request_larger_than_the_pool_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="never fit"):
        replay(512, row("a", 0, 1, 1_000))


def test_runs_are_repeatable() -> None:
    rows = [
        row(f"s{i % 5}", i, i + 0.5, 200 + 40 * (i // 5), 20 + i % 7) for i in range(40)
    ]
    assert replay(1_024, *rows) == replay(1_024, *rows)
