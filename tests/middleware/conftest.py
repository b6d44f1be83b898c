"""Importing the engine takes a while and warns; neither is what a test is about."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook is called with the items of every folder.
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(autouse=True)
def _import_the_engine_quietly(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("vllm") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (
            "vllm.entrypoints.anthropic.protocol",
            "vllm.entrypoints.openai.responses.protocol",
            "vllm.entrypoints.serve.exception_handling.register",
            "vllm.entrypoints.serve.middleware.register",
            "vllm.plugins.endpoint_plugins.interface",
        ):
            importlib.import_module(name)
