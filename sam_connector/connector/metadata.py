"""What the scheduler side tells the worker side each step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class SAMConnectorMetadata(KVConnectorMetadata):
    """Empty: without a tier nothing is copied."""


#: The same object every step; it carries nothing.
EMPTY_METADATA = SAMConnectorMetadata()
