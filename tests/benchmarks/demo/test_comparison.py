from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from benchmarks.demo.comparison import PoolComparison
from benchmarks.demo.pool_run import DEMO_ARMS
from benchmarks.demo.server import ServerKind
from tests.benchmarks.demo.numbers import measures, pool


def test_ratios_are_medians_of_the_ratios_within_a_repeat() -> None:
    """The second repeat ran on a machine twice as slow: no ratio may show it."""
    compared = pool(stock=(1.0, 2.4, 1.1), tier=(0.5, 1.0, 0.6), hints=(0.4, 1.0, 0.6))
    assert compared.ttft_ratio(ServerKind.STOCK) == pytest.approx(1.0 / 2.4)
    assert compared.ttft_ratio(ServerKind.TIER) == pytest.approx(1.0)
    assert compared.median(ServerKind.STOCK).ttft_mean_s == 1.1


def test_everything_is_there_under_its_name() -> None:
    out = pool(
        stock=(1.0, 3.0, 2.0), tier=(0.5, 0.5, 0.5), hints=(0.5, 0.5, 1)
    ).as_json()
    assert out["requests"] == 200
    assert out["ttft_mean_stock_s"] == 2.0
    assert out["ttft_mean_spread_stock_s"] == [1.0, 3.0]
    assert out["ttft_ratio"] == 0.5
    assert out["ttft_ratio_spread"] == [0.1667, 0.5]
    assert out["ttft_ratio_vs_tier"] == 1.0
    for kind in DEMO_ARMS:
        for name in ("cached_rate", "recomputed_tokens", "tokens_per_s"):
            assert f"{name}_{kind}" in out
    assert out["bytes_moved_tier"] == 3 << 20
    assert out["sam_stats"] == {"of": "hints"}
    assert out["sam_stats_tier"] == {"of": "tier"}


def test_calls_without_effect_are_summed_over_the_repeats() -> None:
    out = pool().as_json()
    assert out["control_calls"] == {"lease/404": 2, "offload/accepted": 3}
    assert out["control_calls_failed"] == 2


@pytest.mark.parametrize(
    ("counts", "middle"), [([7], 7), ([1, 9, 4], 4), ([1, 2, 3, 9], 2)]
)
def test_a_median_count_is_a_count(counts: Sequence[int], middle: int) -> None:
    runs = [measures(recomputed_tokens=count) for count in counts]
    compared = PoolComparison(
        label="x",
        num_blocks=1,
        runs={ServerKind.STOCK: runs},
        sam_stats={},
        control_calls=Counter(),
    )
    assert compared.median(ServerKind.STOCK).recomputed_tokens == middle
