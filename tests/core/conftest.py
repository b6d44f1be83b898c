"""What the tests of the core share."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
from hypothesis import settings

# The same examples on every run: a failure is about the change that caused it.
settings.register_profile("core", database=None, deadline=None, derandomize=True)
settings.load_profile("core")


@pytest.fixture(scope="session")
def kv_cache_utils() -> ModuleType:
    """vLLM's module of that name; warnings at its import are not about us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.core import kv_cache_utils
    return kv_cache_utils
