from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.__main__ import main
from tests.benchmarks.trace_replay.rows import row

pytestmark = pytest.mark.vllm


def test_last_line_is_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        row(f"s{i % 3}", 10.0 * i, 10.0 * i + 1, 600 + 64 * (i // 3)) for i in range(12)
    ]
    trace.write_text("\n".join(json.dumps(dataclasses.asdict(r)) for r in rows))
    options = ["--json", "--trace", str(trace), "--gpu-tokens", "1600", "3200"]
    assert main([*options, "--jitter", "1"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["requests"] == 12
    assert set(summary["pools"]) == {"1600", "3200"}
    pool = summary["pools"]["1600"]
    assert {"hit_lru", "hit_hints", "hit_belady", "gap_closed"} <= set(pool)
    assert pool["no_hints_identical"] is True
    assert pool["jittered_gap_closed"]["runs"] == 1
    assert "pool of 1,600 tokens" in captured.out
    assert "belady" in captured.err


def test_without_json_there_is_only_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(dataclasses.asdict(row("a", 0, 1, 100))))
    assert main(["--trace", str(trace), "--gpu-tokens", "1600"]) == 0
    assert "{" not in capsys.readouterr().out
