from __future__ import annotations

import subprocess
import sys

import pytest

from sam_connector import __version__
from sam_connector.cli.main import build_parser, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["show"], ["--urk"]])
def test_wrong_usage_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: sam" in capsys.readouterr().err


def test_a_failed_command_is_status_1_and_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sessions", "--url", "nonsense"]) == 1
    assert capsys.readouterr().err == "sam: 'nonsense' is no http(s) URL\n"


@pytest.mark.parametrize(
    "command",
    ["serve", "doctor", "sessions", "show", "evict", "offload", "prefetch", "reset"],
)
def test_every_command_has_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([command, "--help"])
    assert stop.value.code == 0
    assert f"sam {command}" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m sam_connector.cli.main doctor | true"
    done = subprocess.run(
        ["bash", "-c", command], check=True, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
