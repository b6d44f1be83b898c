from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from benchmarks.demo.workload import TraceRow
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import Replay
from benchmarks.trace_replay.sam_policy import SamPolicy
from benchmarks.trace_replay.server import VirtualServer
from tests.benchmarks.trace_replay.rows import BLOCK_SIZE, SERVICE, row, workload

pytestmark = pytest.mark.vllm


def replay(pool_tokens: int, *rows: TraceRow, policy: Policy | None = None) -> Replay:
    server = VirtualServer(
        workload(*rows),
        pool_tokens=pool_tokens,
        policy=policy or Policy(),
        service=SERVICE,
    )
    result = server.run()
    assert server.manager.usage == 0
    return result


def test_cold_request_is_prefilled_whole() -> None:
    (served,) = replay(4_096, row("a", 3, 4, 1_000, 5)).served
    assert (served.arrival_s, served.first_token_s, served.end_s) == (3, 5, 9)
    assert (served.ttft_s, served.e2e_s, served.tpot_s) == (2, 6, 1)
    assert (served.cached_tokens, served.recomputed_tokens) == (0, 0)


def test_next_turn_hits_input_and_output_but_for_the_last_token() -> None:
    result = replay(4_096, row("a", 0, 1, 1_000, 24), row("a", 3, 4, 1_100))
    # 1,023 tokens have KV: 63 whole blocks.
    assert result.served[1].cached_tokens == 1_008


def test_a_prefill_delays_decoding() -> None:
    alone = replay(8_192, row("a", 0, 1, 1_000, 50)).served[0]
    first, second = replay(
        8_192, row("a", 0, 9, 1_000, 50), row("b", 2.0, 9, 2_000, 1)
    ).served
    assert second.first_token_s == pytest.approx(5.0, abs=0.01)
    assert first.end_s - alone.end_s == pytest.approx(2.0, abs=0.01)


def test_a_request_waits_while_the_prompts_before_it_fill_a_step() -> None:
    server = VirtualServer(
        workload(row("a", 0, 9, 2_000, 1), row("b", 0.5, 9, 100, 1)),
        pool_tokens=8_192,
        policy=Policy(),
        service=replace(SERVICE, max_batched_tokens=500),
    )
    first, second = server.run().served
    assert first.admitted_s == 0.0
    assert second.admitted_s == pytest.approx(2.0)


def test_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    big, waits, small = replay(
        2_048,
        row("a", 0, 10, 1_500, 11),
        row("b", 1, 12, 1_500, 1),
        row("c", 2, 13, 100, 1),
    ).served
    assert big.end_s == 12.5
    assert waits.admitted_s == small.admitted_s == 12.5
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
    assert again.recomputed_tokens == 1_600 - again.cached_tokens


def test_the_request_admitted_last_is_preempted_and_starts_again() -> None:
    result = replay(2_048, row("a", 0, 99, 900, 200), row("b", 0.5, 99, 900, 200))
    assert result.num_preemptions > 0
    first, second = result.served
    assert first.end_s < second.end_s
    assert second.first_token_s < first.end_s


def test_what_is_kept_is_all_that_was_ever_computed() -> None:
    result = replay(4_096, row("a", 0, 1, 1_000, 24), row("b", 3, 4, 1_000, 24))
    # The last token of each has no KV, so its block holds no content.
    assert result.kept_peak == pytest.approx(2 * 63 / 256)
    assert result.use_peak == pytest.approx(64 / 256, abs=0.01)


def test_a_tier_saves_and_brings_back_over_the_link() -> None:
    rows = (
        row("a", 0, 1, 1_600, 1),
        row("b", 100, 101, 1_600, 1),
        row("a", 200, 201, 1_700, 1),
    )
    slots = {"host_bytes": 1 << 30, "save_policy": "all"}
    result = replay(2_048, *rows, policy=SamPolicy("plain", None, slots))
    again = result.served[2]
    assert again.cached_tokens == 1_600
    assert 0 < again.loaded_tokens <= 1_600
    assert again.recomputed_tokens == 0
    block_bytes = SERVICE.kv_bytes_per_token * BLOCK_SIZE
    num_loaded = again.loaded_tokens // BLOCK_SIZE
    # Everything is saved once; ten blocks come back a second.
    num_saved = 100 + 100 + 6
    assert result.bytes_moved == (num_loaded + num_saved) * block_bytes
    assert again.first_token_s - again.arrival_s > num_loaded / 10


def test_a_full_tier_and_pool_leave_nobody_waiting_for_ever() -> None:
    rows = [row(f"s{i % 6}", i, i + 0.5, 1_000 + 64 * (i // 6), 40) for i in range(60)]
    config = {"host_bytes": 1_000 * SERVICE.kv_bytes_per_token, "save_policy": "all"}
    result = replay(2_048, *rows, policy=SamPolicy("plain", None, config))
    assert len(result.served) == 60


def test_a_run_can_be_repeated() -> None:
    rows = [
        row(f"s{i % 5}", i, i + 0.5, 200 + 40 * (i // 5), 20 + i % 7) for i in range(40)
    ]
    assert replay(1_024, *rows) == replay(1_024, *rows)
