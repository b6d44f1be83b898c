"""Sessions for a KV connector that only knows look-up, save and load.

``SPMConnector`` is loaded on first use, since it loads vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sam_connector.connector.spm.connector import SPMConnector

__all__ = ["SPMConnector"]


def __getattr__(name: str) -> Any:
    if name == "SPMConnector":
        from sam_connector.connector.spm.connector import SPMConnector

        return SPMConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
