"""Copy engines: the port, and the choice of one for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sam_connector.transfer.contract import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    JobResult,
)
from sam_connector.transfer.copy_device import CudaDevice
from sam_connector.transfer.cpu_engine import CpuCopyEngine
from sam_connector.transfer.cuda_engine import CudaCopyEngine
from sam_connector.transfer.host_pool import HostPool
from sam_connector.transfer.layout import SlotLayout
from sam_connector.transfer.planner import CopyPlanner

__all__ = [
    "CopyEngine",
    "CopyJob",
    "Direction",
    "GroupCopy",
    "JobResult",
    "make_copy_engine",
]


def make_copy_engine(
    groups: Mapping[int, Sequence[torch.Tensor]],
    layout: SlotLayout,
    pool: HostPool,
    *,
    device: torch.device,
    num_threads: int = 2,
) -> CopyEngine:
    """The engine for blocks on ``device``.

    Args:
        groups: per group id its regions, as given to ``SlotLayout.of``.
        layout: of these groups.
        pool: with slots of that layout; pinned if the device is a GPU.
        device: where the regions lie.
        num_threads: threads that copy on a CPU; a GPU copies by itself.

    Raises:
        ValueError: no engine for this device, or the arguments do not fit each other.
    """
    planner = CopyPlanner(groups, layout, pool)
    _check_device(groups, device)
    if device.type == "cpu":
        return CpuCopyEngine(planner, num_threads)
    if device.type == "cuda":
        if not pool.is_pinned:
            raise ValueError("copies to and from a GPU need a pinned host pool")
        return CudaCopyEngine(planner, CudaDevice(device))
    raise ValueError(f"no copy engine for a {device.type} device")


def _check_device(
    groups: Mapping[int, Sequence[torch.Tensor]], device: torch.device
) -> None:
    for group_id, regions in groups.items():
        if regions[0].device.type != device.type:
            raise ValueError(
                f"group {group_id} lies on {regions[0].device}, not on {device}"
            )
