from __future__ import annotations

from dataclasses import asdict

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.arms import (
    Setting,
    hit_rate,
    mean_ttft,
    policies,
    report,
    run_arms,
)
from benchmarks.trace_replay.figures import figures
from benchmarks.trace_replay.hints import HintRules
from benchmarks.trace_replay.records import Replay, Served, ServiceModel
from benchmarks.trace_replay.workload import Workload
from tests.benchmarks.trace_replay.rows import ring, row, workload

pytestmark = pytest.mark.vllm


def setting(load: Workload, gpu_tokens: int) -> Setting:
    return Setting(
        workload=load,
        gpu_tokens=gpu_tokens,
        host_ratio=4.0,
        rules=HintRules(tool_ttl_s=1_000.0),
        service=ServiceModel(),
    )


def served(index: int, ttft_s: float, cached: int) -> Served:
    return Served(
        index=index,
        arrival_s=1.0,
        admitted_s=1.0,
        first_token_s=1.0 + ttft_s,
        end_s=6.0,
        input_tokens=100,
        output_tokens=5,
        cached_tokens=cached,
        loaded_tokens=0,
        recomputed_tokens=10,
    )


def test_sums_and_means() -> None:
    replay = Replay(
        served=[served(0, 1.0, 20), served(1, 3.0, 60)],
        use_peak=0.5,
        use_mean=0.25,
        kept_peak=1.0,
        kept_mean=0.75,
        num_preemptions=1,
        bytes_moved=7,
        bytes_prefetched=3,
        bytes_wasted=2,
        counts={"leases_broken": 4},
    )
    found = report(replay)
    assert found.hit == hit_rate(replay) == 0.4
    assert found.recomputed_tokens == 20
    assert (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s) == (2.0, 1.0, 3.0)
    assert found.tpot_mean_s == pytest.approx((4.0 / 4 + 2.0 / 4) / 2)
    assert (found.e2e_mean_s, found.makespan_s) == (5.0, 6.0)
    assert (found.leases_broken, found.bytes_wasted) == (4, 2)
    assert mean_ttft(replay, {1}) == 3.0


def test_all_arms_and_no_policy_above_the_optimum() -> None:
    chosen = setting(ring(5, 5, first_tokens=800), 3_600)
    replays = run_arms(chosen, None)
    assert set(replays) == {*policies(chosen), "belady", "belady_tier"}
    hits = {name: hit_rate(replay) for name, replay in replays.items()}
    assert hits["ours_no_hints"] == hits["lru"] < hits["hints"] <= hits["belady"]
    assert hits["lru"] < hits["tier"] <= hits["belady_tier"]
    assert max(hits.values()) == hits["belady_tier"]
    assert replays["belady_tier"].bytes_moved == 0
    found = figures(chosen, replays)
    gap = hits["belady"] - hits["lru"]
    assert found["gap_closed_hints"] == pytest.approx(
        (hits["hints"] - hits["lru"]) / gap
    )
    assert found["no_hints_identical"] == 1.0
    arms = {name: asdict(report(replay)) for name, replay in replays.items()}
    assert found["e2e_ratio_tier"] == pytest.approx(
        arms["tier"]["e2e_mean_s"] / arms["lru"]["e2e_mean_s"]
    )
    assert found["bytes_ratio_vs_plain_tier"] == pytest.approx(
        arms["tier"]["bytes_moved"] / arms["plain_tier"]["bytes_moved"]
    )
    assert found["ttft_mean_ratio_bystanders"] > 0


@pytest.mark.parametrize("gpu_tokens", [1_600, 2_400, 3_200, 4_800])
def test_the_optimum_of_the_pool_is_below_no_policy(gpu_tokens: int) -> None:
    names = ("ours_no_hints", "session_ids", "hints", "belady")
    replays = run_arms(setting(ring(4, 6, first_tokens=700), gpu_tokens), names)
    hits = {name: hit_rate(replay) for name, replay in replays.items()}
    assert max(hits.values()) == hits["belady"]


def test_only_the_arms_that_are_named_run() -> None:
    replays = run_arms(setting(workload(row("a", 0, 1, 100)), 1_600), ("hints",))
    assert set(replays) == {"lru", "hints"}


def test_no_gap_is_closed_wholly() -> None:
    chosen = setting(workload(row("a", 0, 1, 100)), 1_600)
    replays = run_arms(chosen, ("hints", "belady"))
    assert figures(chosen, replays)["gap_closed_hints"] == 1.0
