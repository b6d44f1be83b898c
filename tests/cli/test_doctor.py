from __future__ import annotations

from importlib import metadata

import pytest

from sam_connector.cli import doctor
from sam_connector.cli.doctor import Level
from sam_connector.cli.main import main


def test_old_python_is_a_problem() -> None:
    assert doctor.check_python((3, 10)).level is Level.PROBLEM
    assert doctor.check_python((3, 11)).level is Level.OK


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, Level.OK),
        ({"VLLM_PLUGINS": "sam"}, Level.OK),
        ({"VLLM_PLUGINS": "other,sam"}, Level.OK),
        ({"VLLM_PLUGINS": "other"}, Level.PROBLEM),
        ({"VLLM_PLUGINS": ""}, Level.PROBLEM),
        ({"VLLM_PLUGINS": "same"}, Level.PROBLEM),
    ],
)
def test_plugins_that_vllm_may_load(environ: dict[str, str], level: Level) -> None:
    assert doctor.check_allowed_plugins(environ).level is level


@pytest.mark.parametrize(
    ("value", "level"),
    [(None, Level.OK), ("0", Level.OK), ("1", Level.WARNING), ("true", Level.WARNING)],
)
def test_the_rust_front_end_is_a_warning(value: str | None, level: Level) -> None:
    environ = {} if value is None else {"VLLM_USE_RUST_FRONTEND": value}
    assert doctor.check_front_end(environ).level is level


def test_an_unsupported_engine_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.31.2")
    finding = doctor.check_engine()
    assert finding.level is Level.PROBLEM
    assert "0.31.2" in finding.detail


def test_a_missing_entry_point_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: ())
    finding = doctor.check_entry_point()
    assert finding.level is Level.PROBLEM
    assert "install" in finding.detail


def test_a_connector_that_does_not_load_is_a_problem() -> None:
    def broken() -> str:
        raise ImportError("no such engine")

    finding = doctor._attempt("connector", broken)
    assert finding.level is Level.PROBLEM
    assert finding.detail == "ImportError: no such engine"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_connector_is_registered() -> None:
    finding = doctor.check_connector()
    assert finding.level is Level.OK, finding.detail


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([Level.OK, Level.OK], 0),
        ([Level.OK, Level.WARNING], 0),
        ([Level.PROBLEM, Level.OK], 1),
    ],
)
def test_exit_status_counts_problems_only(
    levels: list[Level],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = [doctor.Finding(check="x", level=level, detail="y") for level in levels]
    monkeypatch.setattr(doctor, "examine", lambda environ: findings)
    assert main(["doctor"]) == code
    assert len(capsys.readouterr().out.splitlines()) == len(levels)
