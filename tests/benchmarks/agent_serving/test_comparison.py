from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.agent_serving.comparison import (
    RATIOS,
    ServingComparison,
    compare,
    measure_group,
)
from benchmarks.demo.replay import RunRecord
from benchmarks.demo.server import ServerKind
from tests.benchmarks.agent_serving.numbers import (
    WORKLOAD,
    completion,
    record,
    replay,
)

STOCK, TIER, HINTS, WRONG = ServerKind


def comparison(**changes: list[RunRecord]) -> ServingComparison:
    """Agent ``b`` is the wrong one; two repeats, the second twice as slow."""
    replays = {
        STOCK: [replay(4.0, 4.0), replay(8.0, 8.0)],
        TIER: [replay(2.0, 2.0), replay(4.0, 4.0)],
        HINTS: [replay(1.0, 1.0, duration_s=5.0), replay(2.0, 2.0, duration_s=5.0)],
        WRONG: [replay(1.0, 9.0), replay(2.2, 9.0)],
    }
    for name, runs in changes.items():
        replays[ServerKind(name)] = runs
    return compare(record(replays), WORKLOAD, num_blocks=9, wrong_sessions={"b/lead"})


def test_ratios_are_medians_of_those_within_a_repeat() -> None:
    """A machine that is slower for a whole repeat shows in no ratio."""
    found = comparison().median_ratios()
    assert found["ttft_mean_ratio_hints"] == 0.25
    assert found["ttft_mean_ratio_vs_tier"] == 0.5
    assert found["ttft_mean_ratio_tier"] == 0.5
    assert found["bytes_ratio_vs_tier"] == 1.0
    assert found["throughput_ratio_hints"] == 2.0
    # A request takes 1 s after its first token: (1 + 1) / (4 + 1), (2 + 1) / (8 + 1).
    assert found["e2e_ratio_hints"] == pytest.approx((0.4 + 1 / 3) / 2, abs=1e-4)
    assert found["tpot_ratio_hints"] == 1.0


def test_bystanders_are_the_sessions_that_are_not_wrong() -> None:
    compared = comparison()
    assert compared.ratios()["ttft_mean_ratio_bystanders"] == pytest.approx([1.0, 1.1])
    assert [run.requests for run in compared.bystanders[WRONG]] == [2, 2]
    assert [run.ttft_mean_s for run in compared.wrong[WRONG]] == [9.0, 9.0]
    assert [run.ttft_mean_s for run in compared.wrong[HINTS]] == [1.0, 2.0]


def test_the_groups_are_all_requests() -> None:
    compared = comparison()
    for kind in (HINTS, WRONG):
        total = compared.pool.median(kind)
        groups = (compared.bystanders[kind][0], compared.wrong[kind][0])
        assert sum(group.requests for group in groups) == total.requests
        computed = sum(group.uncached_tokens for group in groups)
        assert computed == total.uncached_tokens


def test_what_was_cached_was_not_computed() -> None:
    results = {0: completion(1.0, cached=32), 1: completion(3.0), 2: completion(5.0)}
    group = measure_group(RunRecord(results=results), {0, 1})
    assert (group.requests, group.ttft_mean_s) == (2, 2.0)
    assert group.uncached_tokens == 64 - 32 + 64


def test_order_is_by_mean_ttft() -> None:
    assert comparison().order() == [HINTS, TIER, WRONG, STOCK]
    fast = [replay(0.1, 0.1), replay(0.1, 0.1)]
    assert comparison(stock=fast).order() == [STOCK, HINTS, TIER, WRONG]


def test_the_json_has_every_figure_of_every_arm_and_pass() -> None:
    compared = comparison()
    compared.control_calls[HINTS].update({"evict/completed": 2, "lease/404": 1})
    out = compared.as_json()
    assert {*RATIOS, "ttft_mean_ratio_bystanders", "order"} <= set(out)
    arms, runs = out["arms"], out["runs"]
    assert isinstance(arms, dict)
    assert isinstance(runs, dict)
    assert list(arms) == list(runs) == ["stock", "tier", "hints", "wrong"]
    for name in (
        *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "e2e_mean_s"),
        *("tokens_per_s", "requests_per_s", "cached_rate", "bytes_moved"),
    ):
        assert name in arms["stock"]
        assert [name in run for run in runs["wrong"]] == [True, True]
    assert arms["tier"]["ttft_mean_s"] == 3.0
    assert out["control_calls_failed_hints"] == 1
    assert Counter(out["control_calls"]["hints"]).total() == 3  # type: ignore[index]
