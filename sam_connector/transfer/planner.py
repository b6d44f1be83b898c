"""From a job to addresses: checked, in order, with what it has to wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sam_connector.transfer.contract import CopyJob, Direction, GroupCopy
from sam_connector.transfer.host_pool import HostPool
from sam_connector.transfer.layout import (
    Descriptors,
    IntArray,
    RegionTable,
    SlotLayout,
    build_descriptors,
    merge_runs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """A job that can be carried out.

    Attributes:
        seq: position in the order of all planned jobs, from 1.
        after: the last earlier job of the *opposite* direction that shares a slot or
            a block with this one; 0 when there is none.
        descriptors: what to copy, nothing twice.
    """

    job_id: int
    direction: Direction
    seq: int
    after: int
    descriptors: Descriptors


class CopyPlanner:
    """Plans jobs in the order of submission. Not thread-safe.

    It holds the regions and the pool, so that neither goes away under a copy.

    Args:
        groups: per group id its regions, as given to ``SlotLayout.of``.
        layout: of these groups.
        pool: with slots of that layout.

    Raises:
        ValueError: the three do not fit each other.
    """

    def __init__(
        self,
        groups: Mapping[int, Sequence[torch.Tensor]],
        layout: SlotLayout,
        pool: HostPool,
    ) -> None:
        if SlotLayout.of(groups) != layout:
            raise ValueError("the slot layout is of other groups")
        if pool.slot_bytes < layout.slot_bytes:
            raise ValueError(
                f"slots of {pool.slot_bytes} bytes, {layout.slot_bytes} are needed"
            )
        self._held = ({key: tuple(regions) for key, regions in groups.items()}, pool)
        self._tables = {
            group_id: RegionTable.of(regions, layout.offsets[group_id])
            for group_id, regions in groups.items()
        }
        self._pool_base = pool.tensor.data_ptr()
        self._slot_bytes = pool.slot_bytes
        self._num_slots = pool.num_slots
        num_blocks = max(table.num_blocks for table in self._tables.values())
        self._seq = 0
        self._last_on_slot = _last_users(self._num_slots)
        self._last_on_block = _last_users(num_blocks)

    def plan(self, job: CopyJob) -> CopyPlan:
        """Checks everything before anything counts as planned.

        Raises:
            ValueError: the job cannot be carried out; says why.
        """
        parts = [self._checked(part) for part in job.parts]
        _check_destinations(job, parts)
        copies = [
            build_descriptors(
                self._tables[part.group_id],
                block_ids,
                slots,
                pool_base=self._pool_base,
                slot_bytes=self._slot_bytes,
            )
            for part, (block_ids, slots) in zip(job.parts, parts, strict=True)
        ]
        descriptors = merge_runs(Descriptors.concatenate(copies))
        self._seq += 1
        return CopyPlan(
            job_id=job.job_id,
            direction=job.direction,
            seq=self._seq,
            after=max((self._enter(job.direction, *ids) for ids in parts), default=0),
            descriptors=descriptors,
        )

    def _checked(self, part: GroupCopy) -> tuple[IntArray, IntArray]:
        table = self._tables.get(part.group_id)
        if table is None:
            known = sorted(self._tables)
            raise ValueError(f"unknown KV cache group {part.group_id}; known: {known}")
        if len(part.block_ids) != len(part.slots):
            raise ValueError(
                f"{len(part.block_ids)} block ids for {len(part.slots)} slots"
            )
        return (
            _ids("block id", part.block_ids, table.num_blocks),
            _ids("slot", part.slots, self._num_slots),
        )

    def _enter(self, direction: Direction, block_ids: IntArray, slots: IntArray) -> int:
        """Notes this job as the last on its ids; returns whom it must follow."""
        after = 0
        for last, ids in (
            (self._last_on_slot, slots),
            (self._last_on_block, block_ids),
        ):
            after = max(after, int(last[direction.opposite][ids].max(initial=0)))
            last[direction][ids] = self._seq
        return after


def _last_users(count: int) -> dict[Direction, IntArray]:
    return {direction: np.zeros(count, dtype=np.int64) for direction in Direction}


def _ids(name: str, values: Sequence[int], count: int) -> IntArray:
    ids = np.asarray(values)
    if ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name}s are not a list of integers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= count:
        raise ValueError(
            f"{name} {low if low < 0 else high} is out of range: there are {count}"
        )
    return ids.astype(np.int64)


def _check_destinations(
    job: CopyJob, parts: Sequence[tuple[IntArray, IntArray]]
) -> None:
    """Two copies to one place would leave a mixture of both."""
    if job.direction is Direction.STORE:
        _check_distinct("slot", [slots for _, slots in parts])
        return
    for group_id in {part.group_id for part in job.parts}:
        _check_distinct(
            "block id",
            [
                block_ids
                for part, (block_ids, _) in zip(job.parts, parts, strict=True)
                if part.group_id == group_id
            ],
        )


def _check_distinct(name: str, parts: Sequence[IntArray]) -> None:
    ids = np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if repeated.size:
        raise ValueError(f"{name} {repeated[0]} is named twice as a destination")
