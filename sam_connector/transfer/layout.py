"""Where the bytes of a block lie: in the engine's regions and in a host slot.

    region r of a group          host slot s, one contiguous record
    ┌──────────────┐             ┌────────┬────────┬─────┬─────────┐
    │ block 0      │             │ part 0 │ part 1 │ ... │ (unused)│
    │ block 1      │  part r of  └────────┴────────┴─────┴─────────┘
    │ ...          │  the record  offsets[group_id][r], sizes[group_id][r]
    └──────────────┘

The functions below know addresses and sizes only, so they are tested without a device.
Arrays are int64 throughout: user-space addresses fit, and numpy turns a mixture of
uint64 and int64 into floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

IntArray: TypeAlias = npt.NDArray[np.int64]

SLOT_ALIGNMENT = 64


def aligned(record_bytes: int) -> int:
    """Size of the slots that hold records of up to ``record_bytes``."""
    return -(-record_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """How a host slot holds one block of one group.

    Attributes:
        slot_bytes: size of every slot: the largest group's record, rounded up to
            ``SLOT_ALIGNMENT``.
        offsets: per group, where each region's part starts in the slot.
        sizes: per group, the bytes of each region's part.
    """

    slot_bytes: int
    offsets: Mapping[int, tuple[int, ...]]
    sizes: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, groups: Mapping[int, Sequence[torch.Tensor]]) -> Self:
        """The layout for these KV cache groups.

        Args:
            groups: per group id its regions, each a uint8 view
                ``[num_blocks, block_bytes]`` of the engine's memory whose rows are
                dense and do not overlap; rows may be further apart than they are long.

        Raises:
            ValueError: there is no group, or a region has another form.
        """
        if not groups:
            raise ValueError("no KV cache group to lay out")
        for group_id, regions in groups.items():
            _check_regions(group_id, regions)
        sizes = {
            group_id: tuple(region.shape[1] for region in regions)
            for group_id, regions in groups.items()
        }
        largest = max(sum(parts) for parts in sizes.values())
        return cls(
            slot_bytes=aligned(largest),
            offsets={group_id: _starts(parts) for group_id, parts in sizes.items()},
            sizes=sizes,
        )

    def record_bytes(self, group_id: int) -> int:
        """Bytes of a slot that one block of this group uses."""
        return sum(self.sizes[group_id])


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(sizes[:index]) for index in range(len(sizes)))


def _check_regions(group_id: int, regions: Sequence[torch.Tensor]) -> None:
    if not regions:
        raise ValueError(f"group {group_id} has no regions")
    for index, region in enumerate(regions):
        if problem := _problem_of(region):
            raise ValueError(f"group {group_id}, region {index}: {problem}")
    counts = [region.shape[0] for region in regions]
    if len(set(counts)) > 1:
        raise ValueError(f"group {group_id}: regions differ in num_blocks: {counts}")
    devices = {str(region.device) for region in regions}
    if len(devices) > 1:
        raise ValueError(f"group {group_id}: regions lie on several devices: {devices}")


def _problem_of(region: torch.Tensor) -> str | None:
    shape, stride = tuple(region.shape), region.stride()
    if region.dtype != torch.uint8:
        return f"dtype is {region.dtype}, not torch.uint8"
    if region.dim() != 2:
        return f"shape is {shape}, not [num_blocks, block_bytes]"
    if region.numel() == 0:
        return f"shape is {shape}: empty"
    if shape[1] > 1 and stride[1] != 1:
        return f"a block's bytes are {stride[1]} apart, not dense"
    if shape[0] > 1 and stride[0] < shape[1]:
        return f"blocks of {shape[1]} bytes overlap: they start {stride[0]} bytes apart"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """A list of copies: ``sizes[i]`` bytes between ``device[i]`` and ``host[i]``."""

    device: IntArray
    host: IntArray
    sizes: IntArray

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        if len(parts) == 1:
            return parts[0]
        empty: list[IntArray] = [np.empty(0, dtype=np.int64)]
        return cls(
            device=np.concatenate(empty + [part.device for part in parts]),
            host=np.concatenate(empty + [part.host for part in parts]),
            sizes=np.concatenate(empty + [part.sizes for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTable:
    """The addresses of one group's regions and of their parts of a slot.

    Attributes:
        num_blocks: rows of every region.
        bases: address of each region's block 0.
        strides: bytes from one block to the next, per region.
        sizes: bytes of one block, per region.
        offsets: where each region's part starts in a slot.
    """

    num_blocks: int
    bases: IntArray
    strides: IntArray
    sizes: IntArray
    offsets: IntArray

    @classmethod
    def of(cls, regions: Sequence[torch.Tensor], offsets: Sequence[int]) -> Self:
        return cls(
            num_blocks=regions[0].shape[0],
            bases=_ints([region.data_ptr() for region in regions]),
            strides=_ints([region.stride(0) for region in regions]),
            sizes=_ints([region.shape[1] for region in regions]),
            offsets=_ints(offsets),
        )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def build_descriptors(
    table: RegionTable,
    block_ids: IntArray,
    slots: IntArray,
    *,
    pool_base: int,
    slot_bytes: int,
) -> Descriptors:
    """One descriptor per block and region, in the order of the slots' addresses.

    That order puts everything that is contiguous on both sides next to each other,
    whatever the order of the ids.
    """
    order = np.argsort(slots, kind="stable")
    rows, starts = block_ids[order, None], slots[order, None]
    device = table.bases + rows * table.strides
    host = pool_base + starts * slot_bytes + table.offsets
    return Descriptors(
        device=device.ravel(),
        host=host.ravel(),
        sizes=np.tile(table.sizes, len(order)),
    )


def merge_runs(descriptors: Descriptors) -> Descriptors:
    """Joins neighbours in the list that are contiguous on both sides."""
    device, host, sizes = descriptors.device, descriptors.host, descriptors.sizes
    if len(sizes) < 2:
        return descriptors
    joins = (device[:-1] + sizes[:-1] == device[1:]) & (
        host[:-1] + sizes[:-1] == host[1:]
    )
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Descriptors(
        device=device[first],
        host=host[first],
        sizes=np.add.reduceat(sizes, first),
    )


def slice_bytes(descriptors: Descriptors, start: int, end: int) -> Descriptors:
    """The copies of bytes ``[start, end)``, counted through the list; cuts copies."""
    if start >= end:
        return Descriptors.concatenate([])
    ends = np.cumsum(descriptors.sizes)
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, end, side="left"))
    device = descriptors.device[first : last + 1].copy()
    host = descriptors.host[first : last + 1].copy()
    sizes = descriptors.sizes[first : last + 1].copy()
    cut = start - int(ends[first] - descriptors.sizes[first])
    device[0] += cut
    host[0] += cut
    sizes[0] -= cut
    sizes[-1] -= int(ends[last]) - end
    return Descriptors(device=device, host=host, sizes=sizes)


def split_by_bytes(
    descriptors: Descriptors, num_shares: int, *, min_bytes: int = 1
) -> list[Descriptors]:
    """Up to ``num_shares`` parts of equal bytes, none much below ``min_bytes``."""
    total = descriptors.num_bytes
    num_shares = max(1, min(num_shares, total // min_bytes))
    if num_shares == 1:
        return [descriptors]
    cuts = [total * index // num_shares for index in range(num_shares + 1)]
    return [
        slice_bytes(descriptors, start, end) for start, end in itertools.pairwise(cuts)
    ]
