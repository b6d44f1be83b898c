"""Entry points that vLLM loads: our name in its registry, our call in its engine.

Everything here is additive and idempotent: a connector name, and one method that
``EngineCore`` does not have. No behaviour of vLLM's is replaced.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

CONNECTOR_NAME = "SAMConnector"

#: What ``kv_connector`` may name, and where that is.
_CONNECTORS = {
    CONNECTOR_NAME: "sam_connector.connector.facade",
    "SPMConnector": "sam_connector.connector.spm.connector",
}

#: Name of the engine utility the API server calls.
UTILITY_NAME = "sam_control"


def register() -> None:
    """``vllm.general_plugins``: called in every process that vLLM starts."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.engine.core import EngineCore

    _share_log()
    for name, module in _CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    if not hasattr(EngineCore, UTILITY_NAME):
        setattr(EngineCore, UTILITY_NAME, _control)


class _VllmLog(logging.Handler):
    """Sends our log where vLLM's goes.

    vLLM sets up handlers for its own name only, and anew whenever it likes, so they
    are looked up for each record.
    """

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger("vllm").handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def _share_log() -> None:
    ours = logging.getLogger("sam_connector")
    if not ours.handlers:
        ours.addHandler(_VllmLog())
        ours.setLevel(logging.INFO)


def _control(engine: EngineCore, payload: str) -> str | Future[str]:
    """Answers one control call; runs on the engine's thread, between steps.

    A ``Future`` defers the answer until an operation has ended.
    """
    from sam_connector.errors import SamError

    connector = find_connector(getattr(engine.scheduler, "connector", None))
    if connector is None:
        raise SamError("no SAMConnector is configured in this engine")
    connector.scheduler_side.waker.attach(engine)
    answer: str | Future[str] = connector.scheduler_side.control(
        payload, is_paused=engine.is_sleeping()
    )
    return answer


def find_connector(connector: Any) -> Any | None:
    """The bound ``SAMConnector``, itself or as a child of a ``MultiConnector``."""
    for candidate in (connector, *getattr(connector, "sub_connectors", ())):
        if getattr(candidate, "scheduler_side", None) is not None:
            return candidate
    return None
