from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.__main__ import main
from tests.benchmarks.trace_replay.rows import row

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]

KEYS = {
    "hit_lru",
    "hit_hints",
    "hit_tier",
    "hit_belady",
    "recomputed_ratio_tier",
    "ttft_mean_ratio_tier",
    "ttft_p99_ratio_tier",
    "tpot_ratio_tier",
    "e2e_ratio_tier",
    "peak_ratio_hints",
    "ttft_mean_ratio_vs_plain_tier",
    "bytes_ratio_vs_plain_tier",
    "ttft_mean_ratio_bystanders",
}


def trace_at(path: Path) -> Path:
    rows = [
        row(f"s{i % 5}", 10.0 * i, 10.0 * i + 1, 600 + 64 * (i // 5)) for i in range(20)
    ]
    path.write_text("\n".join(json.dumps(dataclasses.asdict(r)) for r in rows))
    return path


def test_last_line_is_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, png = trace_at(tmp_path / "trace.jsonl"), tmp_path / "hits.png"
    options = ["--json", "--trace", str(trace), "--png", str(png), "--processes", "1"]
    sizes = ["--gpu-tokens", "1600", "3200", "--draws", "2", "--no-direct"]
    assert main([*options, *sizes]) == 0
    out = capsys.readouterr().out
    summary = json.loads(out.splitlines()[-1])
    assert summary.keys() >= KEYS
    assert (summary["requests"], summary["gpu_tokens"]) == (20, 3_200)
    assert set(summary["pools"]) == {"1600", "3200"}
    pool = summary["pools"]["3200"]
    assert pool["figures"]["hit_lru"] == summary["hit_lru"]
    assert pool["figures"]["no_hints_identical"] == 1.0
    assert pool["arms"]["tier"]["hit"] == summary["hit_tier"]
    assert "GPU cache of 1,600 tokens" in out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_json_there_is_only_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_at(tmp_path / "trace.jsonl")
    options = ["--gpu-tokens", "1600", "--draws", "1", "--no-direct"]
    assert main(["--trace", str(trace), *options, "--processes", "1"]) == 0
    assert "{" not in capsys.readouterr().out


def test_a_conversation_is_replayed_in_an_open_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "chat.jsonl"
    records = [
        {
            "timestamp": 100 * i,
            "input_length": 1_600,
            "output_length": 5,
            "hash_ids": [0, i % 3, 100 + i % 3, 1_000 + i],
        }
        for i in range(12)
    ]
    trace.write_text("\n".join(map(json.dumps, records)))
    options = ["--json", "--gpu-tokens", "4096", "--processes", "1"]
    assert main(["--trace", str(trace), *options]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["hit_lru"] <= summary["hit_belady"]
    assert summary["no_hints_identical"] == 1.0
    assert summary["direct"] == {}


@pytest.mark.parametrize("text", ["", "[]", "no json"])
def test_what_is_no_trace_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    assert main(["--trace", str(trace)]) == 2
    assert "cannot read" in capsys.readouterr().err
