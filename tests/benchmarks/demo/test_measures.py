from __future__ import annotations

import pytest

from benchmarks.demo.client import Completion
from benchmarks.demo.measures import measure, percentile, reusable_tokens, tpot_mean_s
from benchmarks.demo.replay import RunRecord
from benchmarks.demo.workload import TraceRow, build_workload


@pytest.mark.parametrize(
    ("seen", "prompt", "reusable"),
    [
        (0, 100, 0),
        (31, 100, 0),
        (64, 100, 64),
        (95, 96, 64),
        (96, 96, 64),
        (97, 97, 96),
    ],
)
def test_reusable_is_whole_blocks_and_never_the_last_token(
    seen: int, prompt: int, reusable: int
) -> None:
    assert reusable_tokens(seen, prompt, 32) == reusable


@pytest.mark.parametrize(
    ("fraction", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)]
)
def test_percentile_is_nearest_rank(fraction: float, value: int) -> None:
    assert percentile([1, 2, 3, 4], fraction) == value


def test_recomputed_is_what_a_cache_could_have_saved() -> None:
    rows = [
        TraceRow(
            session="a/lead",
            parent=None,
            start_s=float(2 * i),
            end_s=float(2 * i + 1),
            input_tokens=tokens,
            output_tokens=1,
        )
        for i, tokens in enumerate((100, 200, 300))
    ]
    workload = build_workload(
        rows, num_rows=3, token_divisor=1, gap_divisor=1.0, vocab_size=64
    )
    results = {
        i: Completion(
            ttft_s=ttft_s,
            latency_s=1.0,
            prompt_tokens=workload.turns[i].num_prompt_tokens,
            cached_tokens=cached,
            completion_tokens=1 + 2 * i,
        )
        for i, (ttft_s, cached) in enumerate([(0.1, 0), (0.3, 96), (0.2, 64)])
    }
    record = RunRecord(results=results, saved_bytes=3, loaded_bytes=4, duration_s=2.0)
    measures = measure(record, workload, 32)
    assert measures.uncached_tokens == 600 - 160
    # The third could have had 192 of the second's 200 tokens and had 64.
    assert measures.recomputed_tokens == 192 - 64
    assert measures.ttft_mean_s == pytest.approx(0.2)
    assert measures.cached_rate == pytest.approx(160 / 600)
    assert measures.bytes_moved == 3 + 4
    assert measures.e2e_mean_s == pytest.approx(1.0)
    # The first made one token only, which says nothing about the time for a next one.
    assert measures.tpot_mean_s == pytest.approx((0.7 / 2 + 0.8 / 4) / 2)
    assert measures.requests_per_s == pytest.approx(1.5)
    assert measures.tokens_per_s == pytest.approx((600 + 9) / 2.0)


def test_no_time_per_token_where_nobody_made_two() -> None:
    assert tpot_mean_s([]) == 0.0
