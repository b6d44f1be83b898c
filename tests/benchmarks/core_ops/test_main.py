from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from benchmarks.core_ops import __main__ as program
from benchmarks.core_ops import longest_step, measure

pytestmark = pytest.mark.vllm


def test_last_line_is_one_json_object_with_every_aim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = measure.Plan(sizes=(4_500, 5_000), num_rounds=2, num_pairs=2)
    monkeypatch.setattr(measure, "Plan", lambda: small)
    monkeypatch.setattr(longest_step, "CONTEXT_BLOCKS", 200)
    assert program.main(["--json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert set(summary["aims"]) <= set(summary)
    assert summary["sizes"] == [4_500, 5_000]
    assert {"index_growth", "sessions_growth", "tracker_growth"} <= set(summary)
    assert summary["longest_step_us"] == max(summary["steps_us"].values())
    assert summary["zoned_queue_ratio"] == max(
        found["ratio"] for found in summary["queues"].values()
    )


def test_without_json_there_is_only_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "measure", lambda plan, note: {"stub": True})
    monkeypatch.setattr(program, "table", lambda summary: "a table")
    assert program.main([]) == 0
    assert capsys.readouterr().out == "a table\n"
