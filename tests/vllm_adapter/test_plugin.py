"""What the entry point adds to vLLM, and that it adds it once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sam_connector.errors import SamError
from sam_connector.vllm_adapter import plugin
from tests.connector.driving import Driver

pytestmark = pytest.mark.vllm


def test_registration_is_idempotent_and_makes_the_name_known() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import sam_connector

    plugin.register()
    plugin.register()
    loaded = KVConnectorFactory.get_connector_class_by_name("SAMConnector")
    assert loaded is sam_connector.SAMConnector


def test_the_utility_reaches_the_connector() -> None:
    from vllm.v1.engine.core import EngineCore

    plugin.register()
    driver = Driver()
    engine = SimpleNamespace(scheduler=driver.scheduler, is_sleeping=lambda: False)
    control: Any = getattr(EngineCore, plugin.UTILITY_NAME)
    assert '"ok": true' in control(engine, '{"op": "get_stats"}')


def test_an_engine_without_our_connector_says_so() -> None:
    engine: Any = SimpleNamespace(
        scheduler=Driver("null").scheduler, is_sleeping=lambda: False
    )
    with pytest.raises(SamError, match="no SAMConnector"):
        plugin._control(engine, '{"op": "get_stats"}')


def test_our_log_goes_where_the_engines_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when vLLM sets its handlers up later, or anew."""
    plugin.register()
    seen: list[str] = []
    handler = logging.Handler(level=logging.INFO)
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.msg))
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    logging.getLogger("sam_connector.somewhere").info("told")
    logging.getLogger("sam_connector.somewhere").debug("not told")
    assert seen == ["told"]
