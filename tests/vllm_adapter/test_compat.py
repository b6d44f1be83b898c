"""The list of vLLM internals relied on, and what happens when one vanishes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sam_connector.errors import IncompatibleEngineError
from sam_connector.vllm_adapter import compat
from tests.connector.driving import STREAMS, Driver

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.33.1", True),
        ("0.33.0rc1+cpu", True),
        ("0.34.0", False),
        ("1.0.0", False),
        ("unknown", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert compat.is_supported(version) is supported


def test_s07_another_version_is_refused_with_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.40.0")
    with pytest.raises(IncompatibleEngineError, match=r"needs vLLM 0\.32 .* 0\.40\.0"):
        Driver()


def test_the_installed_vllm_has_everything() -> None:
    compat.check_version()
    manager = Driver("null").scheduler.kv_cache_manager
    assert compat.missing_internals(manager) == []


@pytest.mark.parametrize("name", ["blocks", "cached_block_hash_to_block"])
def test_s09_a_missing_internal_is_named_and_the_server_starts_with_hints_off(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "_POOL_FIELDS", (*compat._POOL_FIELDS, f"new_{name}"))
    driver = Driver()
    assert driver.side.host is None
    assert f"BlockPool.new_{name}" in caplog.text
    driver.add("r", STREAMS[0][:64], agent_hint={"session_id": "s"}, max_tokens=2)
    driver.engine.run_until_idle()
    assert len(driver.engine.outputs["r"]) == 2
    assert driver.call("get_stats")["ok"] is False


def test_a_queue_method_we_do_not_know_counts_as_missing() -> None:
    manager: Any = Driver("null").scheduler.kv_cache_manager
    queue = manager.block_pool.free_block_queue
    queue.__class__ = type("Grown", (type(queue),), {"pop_right": lambda self: None})
    assert compat.missing_internals(manager) == ["FreeKVCacheBlockQueue.pop_right"]


def test_a_manager_without_a_pool_is_reported_not_raised() -> None:
    missing = compat.missing_internals(SimpleNamespace())
    assert "KVCacheManager.coordinator.single_type_managers" in missing
    assert "BlockPool.blocks" in missing
