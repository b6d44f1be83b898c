"""The KV connector that vLLM loads; imported on first use, since it loads vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sam_connector.connector.facade import SAMConnector

__all__ = ["SAMConnector"]


def __getattr__(name: str) -> Any:
    if name == "SAMConnector":
        from sam_connector.connector.facade import SAMConnector

        return SAMConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
