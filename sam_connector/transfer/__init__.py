"""Moving KV blocks between device memory and host slots. Needs torch, not vLLM."""

from sam_connector.transfer.engine import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    JobResult,
    make_copy_engine,
)
from sam_connector.transfer.host_pool import HostPool
from sam_connector.transfer.layout import SlotLayout

__all__ = [
    "CopyEngine",
    "CopyJob",
    "Direction",
    "GroupCopy",
    "HostPool",
    "JobResult",
    "SlotLayout",
    "make_copy_engine",
]
