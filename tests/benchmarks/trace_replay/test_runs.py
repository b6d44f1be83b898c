from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.records import ServiceModel
from benchmarks.trace_replay.runs import as_json, jittered, run_pool
from benchmarks.trace_replay.sam_policy import HintRules
from tests.benchmarks.trace_replay.rows import ring, row, workload

pytestmark = pytest.mark.vllm


def test_all_arms_of_a_pool() -> None:
    notes: list[str] = []
    report = run_pool(
        ring(4, 5, first_tokens=800),
        3_600,
        rules=HintRules(tool_ttl_s=1_000.0),
        service=ServiceModel(),
        note=notes.append,
    )
    assert set(report.arms) == {"lru", "ours_no_hints", "hints", "belady"}
    assert report.no_hints_identical
    assert report.hit_ours_no_hints == report.hit_lru < report.hit_belady
    gap = report.hit_belady - report.hit_lru
    assert report.gap_closed == pytest.approx((report.hit_hints - report.hit_lru) / gap)
    assert report.arms["lru"].ttft_p50_s <= report.arms["lru"].ttft_p99_s
    assert len(notes) == 5
    plain = as_json(report)
    assert plain["gpu_tokens"] == 3_600
    assert {"hit_lru", "hit_hints", "hit_belady", "gap_closed"} <= set(plain)


def test_no_gap_closes_nothing() -> None:
    report = run_pool(
        workload(row("a", 0, 1, 100)),
        1_600,
        rules=HintRules(),
        service=ServiceModel(),
        note=lambda text: None,
    )
    assert report.gap_closed == 0.0


def test_jitter_moves_the_starts_of_tasks_only() -> None:
    load = workload(row("a", 0, 1, 100), row("a", 2, 3, 200), row("b", 5, 6, 100))
    moved = jittered(load, 1)
    assert moved == jittered(load, 1) != jittered(load, 2)
    assert [
        t.offset_s > o.offset_s for t, o in zip(moved.turns, load.turns, strict=True)
    ] == [
        True,
        False,
        True,
    ]
