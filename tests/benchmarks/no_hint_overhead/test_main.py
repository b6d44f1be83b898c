from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from benchmarks.no_hint_overhead import __main__ as program
from benchmarks.no_hint_overhead import footprint, long_context, measure, running
from benchmarks.no_hint_overhead.mix import MixShape

pytestmark = pytest.mark.vllm


def test_fewer_than_twenty_pairs_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        program.main(["--pairs", "19"])
    assert "at least 20" in capsys.readouterr().err


def test_last_line_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = MixShape(
        num_agents=2,
        num_turns=1,
        first_prompt=(20, 40),
        output=(1, 2),
        num_blocks=64,
        max_running=2,
    )
    monkeypatch.setattr(measure.mix, "MixShape", lambda: small)
    monkeypatch.setattr(program, "MIN_PAIRS", 2)
    monkeypatch.setattr(long_context, "NUM_BLOCKS", 64)
    monkeypatch.setattr(
        long_context,
        "worst_steps",
        lambda: long_context.WorstStep(
            evict_ms=1.0, edit_ms=3.0, expiry_ms=2.0, traffic_ms=0.5
        ),
    )
    few = running.Shape(num_requests=2, context_blocks=32, num_turns=2)
    monkeypatch.setattr(running, "Shape", lambda: few)
    monkeypatch.setattr(footprint, "CONTEXT_BLOCKS", 64)
    monkeypatch.setattr(footprint, "NUM_SESSIONS", (2, 6))
    monkeypatch.setattr(program.logging, "disable", lambda level: None)
    assert program.main(["--json", "--pairs", "2"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {
        "cpu_ratio_no_hints",
        "cpu_ratio_hints",
        "cpu_ratio_stock_self",
        "finish_ratio_4096",
        "worst_step_ms",
        "cpu_ratio_no_hints_64x128k",
        "cpu_ratio_hints_64x128k",
        "metadata_bytes_per_block",
    } <= set(summary)
    assert set(summary["aims"]) <= set(summary)
    assert summary["pairs"] == 2
    assert summary["worst_step_ms"] == 3.0
