from __future__ import annotations

import json

import pytest

from benchmarks.bench import suite
from benchmarks.bench.__main__ import main
from benchmarks.bench.suite import BenchmarkFailed, run


def test_a_run_without_json_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RUNS", {"none": ("this", "--version")})
    with pytest.raises(BenchmarkFailed, match="none ended with 0"):
        run("none")


def test_a_failure_is_told_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"core_ops": ("no_such_module",), "transfer": ("json.tool", "--help")}
    monkeypatch.setattr(suite, "RUNS", runs)
    assert main(["--only", "core_ops", "transfer"]) == 1
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["failed"] == ["core_ops", "transfer"]
    assert summary["met"] == 0
    assert "No module named" in captured.err
    assert "| zoned queue over stock's |" in captured.out
