"""Rules for every test: what is skipped where, and how long a test may take."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

#: Multiplies every time limit; raise it on a machine that is busy or slow.
TIMEOUT_FACTOR = float(os.environ.get("SAM_TEST_TIMEOUT_FACTOR", "1"))

_has_engine = find_spec("vllm") is not None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items:
        if item.get_closest_marker("vllm") and not _has_engine:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
        _scale_timeout(item, float(config.getini("timeout") or 0))


def _scale_timeout(item: pytest.Item, default_s: float) -> None:
    if TIMEOUT_FACTOR == 1:
        return
    marker = item.get_closest_marker("timeout")
    limit_s = marker.args[0] if marker and marker.args else default_s
    item.add_marker(pytest.mark.timeout(limit_s * TIMEOUT_FACTOR), append=False)
