"""Session hints for the KV cache of stock vLLM.

The two public names are the two values a server is started with::

    --kv-transfer-config '{"kv_connector": "SAMConnector", ...}'
    --middleware sam_connector.AgentHintMiddleware

They load on first use: importing this package must stay cheap and must work
where neither vLLM nor torch is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sam_connector.connector import SAMConnector
    from sam_connector.middleware import AgentHintMiddleware

__all__ = ["AgentHintMiddleware", "SAMConnector", "__version__"]

__version__ = "0.1.0"

_LAZY = {
    "AgentHintMiddleware": "sam_connector.middleware",
    "SAMConnector": "sam_connector.connector",
}


def __getattr__(name: str) -> object:
    try:
        module = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
