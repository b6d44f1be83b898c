"""What the package promises to its importers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module, metadata
from importlib.util import find_spec

import pytest

import sam_connector

PUBLIC = ["AgentHintMiddleware", "SAMConnector", "__version__"]
HEAVY = ("vllm", "torch", "pydantic", "starlette")


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after ``statement``."""
    code = (
        f"{statement}\nimport sys\nprint(*{{m.partition('.')[0] for m in sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def test_all_is_frozen() -> None:
    assert sorted(sam_connector.__all__) == PUBLIC
    assert dir(sam_connector) == PUBLIC


def test_version_is_the_distributions() -> None:
    try:
        installed = metadata.version("sam-connector")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert sam_connector.__version__ == installed


def test_import_is_cheap() -> None:
    assert not modules_after("import sam_connector") & set(HEAVY)


def test_command_line_starts_without_the_engine() -> None:
    loaded = modules_after("import sam_connector.cli.main as m; m.build_parser()")
    assert not loaded & set(HEAVY)


def test_middleware_loads_neither_engine_nor_torch() -> None:
    loaded = modules_after("from sam_connector import AgentHintMiddleware")
    assert not loaded & {"vllm", "torch"}


def test_middleware_is_a_class() -> None:
    """vLLM wraps anything else in a way that hides disconnects."""
    assert isinstance(sam_connector.AgentHintMiddleware, type)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_connector_is_the_connector_module_s() -> None:
    module = import_module("sam_connector.connector")
    assert sam_connector.SAMConnector is module.SAMConnector


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sam_connector.nonsense  # noqa: B018


def test_backends_are_importable_without_their_clients() -> None:
    assert find_spec("sam_backends") is not None
    assert not modules_after("import sam_backends") & {"redis", "lmcache", "mooncake"}
