from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth import __main__ as program
from benchmarks.transfer_bandwidth import store_path
from benchmarks.transfer_bandwidth.settings import Settings

ROOT = Path(program.__file__).resolve().parents[2]

#: Sizes like the fixture's, in a process where there is no vLLM.
WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None
from dataclasses import replace
from benchmarks.transfer_bandwidth import __main__ as program
from benchmarks.transfer_bandwidth.settings import Settings
real = Settings.of
Settings.of = classmethod(lambda cls, options: replace(
    real(options), num_bytes=8 << 20, repeats=1, compute_s=0.002,
    block_sizes=(32768, 65536), some_block_sizes=(32768,), job_sizes=(1,)))
sys.exit(program.main(["--json"]))
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.setattr(Settings, "of", lambda options: settings)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("small")
def test_last_line_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("block_to_slot", "slot_to_store", "store_to_slot", "slot_to_block")
    rates = dict.fromkeys((*names, "out", "back"), 1.0)
    monkeypatch.setattr(store_path, "measure", lambda device, num_rounds: rates)
    assert program.main(["--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["aims"].keys() <= found.keys()
    large = [
        row["ratio"]
        for row in found["rows"]
        if row["interpreter"] == "idle" and row["block_bytes"] >= 65536
    ]
    assert found["cpu_vs_memcpy_least"] == min(large)
    assert found["whole_path_out_gbs"] == 1.0
    assert found["whole_path_gb_s"] == rates
    assert {"torch", "cpu", "cores", "python", "wall_s"} <= set(found)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("small")
def test_without_json_there_are_tables_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program.main(["--no-store"]) == 0
    out = capsys.readouterr().out
    assert "{" not in out
    assert "to a store" not in out
    assert len([line for line in out.splitlines() if line.startswith("---")]) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program.main(["--device", "cuda", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "--device cuda: torch finds no CUDA device here\n"


@pytest.mark.timeout(120)
def test_without_vllm_all_but_the_store_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "vllm" in found["whole_path_left_out"]
    assert "whole_path_out_gbs" not in found
    assert found["aims"].keys() <= found.keys()
