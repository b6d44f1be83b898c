from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sam_connector.cli.errors import CommandError
from sam_connector.cli.main import build_parser, main
from sam_connector.cli.serve import MIDDLEWARE, parse_config, server_arguments


def transfer_config(arguments: list[str]) -> dict[str, object]:
    parsed = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert isinstance(parsed, dict)
    return parsed


def test_fills_in_the_two_flags() -> None:
    arguments = server_arguments("org/model", ["--port", "9000"], {})
    assert arguments[:2] == ["--model", "org/model"]
    assert transfer_config(arguments) == {
        "kv_connector": "SAMConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert arguments[arguments.index("--middleware") + 1] == MIDDLEWARE
    assert arguments[-2:] == ["--port", "9000"]


def test_passes_the_connectors_settings_on() -> None:
    arguments = server_arguments("m", [], {"sam": "shadow"})
    config = transfer_config(arguments)
    assert config["kv_connector_extra_config"] == {"sam": "shadow"}


def test_everything_after_the_model_is_vllms() -> None:
    given = ["serve", "--sam-config", "{}", "m", "--port", "1", "--help", "x"]
    options = build_parser().parse_args(given)
    assert options.model == "m"
    assert options.vllm_args == ["--port", "1", "--help", "x"]


def test_another_middleware_is_kept() -> None:
    arguments = server_arguments("m", ["--middleware", "mine.Middleware"], {})
    assert arguments[-2:] == ["--middleware", "mine.Middleware"]


@pytest.mark.parametrize(
    "given",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv-transfer-config={}"],
        ["--kv_transfer_config", "{}"],
        ["--kv-transfer-config.kv_role", "kv_both"],
        ["--model", "other"],
        ["--middleware", MIDDLEWARE],
        [f"--middleware={MIDDLEWARE}"],
    ],
)
def test_refuses_what_it_fills_in(given: list[str]) -> None:
    with pytest.raises(CommandError, match="sam serve"):
        server_arguments("m", ["--port", "1", *given], {})


@pytest.mark.parametrize("text", ["{", "[]", "3", ""])
def test_refuses_settings_that_are_no_object(text: str) -> None:
    with pytest.raises(CommandError, match="--sam-config"):
        parse_config(text)


def test_conflict_ends_the_command_before_any_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "m", "--model", "x"]) == 1
    assert "MODEL is the first argument" in capsys.readouterr().err


def test_without_vllm_it_says_so(tmp_path: Path) -> None:
    """In an interpreter that sees nothing but this package."""
    root = Path(__file__).parents[2]
    code = "import sys; from sam_connector.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "serve", "m"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "sam: vLLM is not installed beside sam-connector\n"


def test_runs_the_server_module_with_its_arguments(tmp_path: Path) -> None:
    """A package named ``vllm`` that prints what it was started with stands in."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text("import sys; print(sys.argv[1:])\n")
    root = Path(__file__).parents[2]
    code = "import sys; from sam_connector.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "serve", "m", "--port", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(server_arguments("m", ["--port", "1"], {}))


def test_wrong_settings_are_named_before_anything_is_started() -> None:
    with pytest.raises(CommandError) as raised:
        parse_config('{"bogus": 1, "sam": "maybe"}')
    assert "bogus" in str(raised.value)
    assert "sam must be one of" in str(raised.value)


def test_settings_behind_the_model_are_not_passed_on() -> None:
    with pytest.raises(CommandError, match="before MODEL"):
        server_arguments("m", ["--sam-config", "{}"], {})
