"""An engine's KV memory in small, a host pool, and what both must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sam_connector.transfer import CopyJob, Direction, GroupCopy, HostPool, SlotLayout

CPU = torch.device("cpu")
GUARD_BYTES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A region by plain numbers: ``num_blocks`` rows inside a buffer."""

    buffer: int
    start: int
    stride: int
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the engine's buffers, and where the groups' regions lie in them."""

    buffer_bytes: tuple[int, ...]
    groups: dict[int, tuple[Rows, ...]]


def separate(sizes: Sequence[int], num_blocks: int = 12) -> Shape:
    """One buffer per region, with guards before and behind."""
    return Shape(
        buffer_bytes=tuple(size * num_blocks + 2 * GUARD_BYTES for size in sizes),
        groups={
            0: tuple(
                Rows(
                    buffer=index,
                    start=GUARD_BYTES,
                    stride=size,
                    num_blocks=num_blocks,
                    block_bytes=size,
                )
                for index, size in enumerate(sizes)
            )
        },
    )


def packed(sizes: Sequence[int], gap: int = 0, num_blocks: int = 12) -> Shape:
    """All regions of a block next to each other in one buffer."""
    stride = sum(sizes) + gap
    return Shape(
        buffer_bytes=(stride * num_blocks + GUARD_BYTES,),
        groups={
            0: tuple(
                Rows(
                    buffer=0,
                    start=sum(sizes[:index]),
                    stride=stride,
                    num_blocks=num_blocks,
                    block_bytes=size,
                )
                for index, size in enumerate(sizes)
            )
        },
    )


def keys_then_values(
    half: int = 160, num_layers: int = 2, num_blocks: int = 12
) -> Shape:
    """Per layer all keys, then all values: two regions in one buffer."""
    return Shape(
        buffer_bytes=(2 * half * num_blocks,) * num_layers,
        groups={
            0: tuple(
                Rows(
                    buffer=layer,
                    start=side * half * num_blocks,
                    stride=half,
                    num_blocks=num_blocks,
                    block_bytes=half,
                )
                for layer in range(num_layers)
                for side in range(2)
            )
        },
    )


def two_groups() -> Shape:
    """Groups of different size, region count and number of blocks."""
    first, second = separate([128, 64]), separate([48, 80, 16], num_blocks=9)
    shifted = tuple(
        Rows(
            buffer=rows.buffer + 2,
            start=rows.start,
            stride=rows.stride,
            num_blocks=rows.num_blocks,
            block_bytes=rows.block_bytes,
        )
        for rows in second.groups[0]
    )
    return Shape(
        buffer_bytes=first.buffer_bytes + second.buffer_bytes,
        groups={0: first.groups[0], 7: shifted},
    )


SHAPES: dict[str, Callable[[], Shape]] = {
    "layers_of_one_size": lambda: separate([256, 256, 256]),
    "layers_of_differing_size": lambda: separate([256, 1, 77, 4096]),
    "one_region_that_fills_its_slot": lambda: separate([576]),
    "one_region_that_does_not": lambda: separate([600]),
    "packed": lambda: packed([64, 128, 32]),
    "packed_with_gaps": lambda: packed([64, 100], gap=28),
    "keys_and_values_in_one_block": lambda: separate([2 * 160, 2 * 160]),
    "keys_then_values": keys_then_values,
    "two_groups": two_groups,
}


class Memory:
    """Buffers, regions and a pool, all with random bytes; and a naive model of both.

    Args:
        shape: of the engine's memory.
        num_slots: of the pool.
        device: where the engine's memory lies.
        pin: pin the pool.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_slots: int = 16,
        device: torch.device = CPU,
        pin: bool = False,
    ) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(11)
        self.buffers = [
            _random(size, generator).to(device) for size in shape.buffer_bytes
        ]
        self.groups = {
            group_id: tuple(self._region(rows) for rows in regions)
            for group_id, regions in shape.groups.items()
        }
        self.layout = SlotLayout.of(self.groups)
        self.pool = HostPool(num_slots, self.layout.slot_bytes, pin=pin)
        self.pool.tensor.copy_(
            _random(self.pool.num_bytes, generator).view_as(self.pool.tensor)
        )
        self.sync_model()

    def _region(self, rows: Rows) -> torch.Tensor:
        return self.buffers[rows.buffer].as_strided(
            (rows.num_blocks, rows.block_bytes), (rows.stride, 1), rows.start
        )

    def sync_model(self) -> None:
        """The model takes over what is there now."""
        self.model_buffers = [buffer.cpu().numpy().copy() for buffer in self.buffers]
        self.model_pool = self.pool.tensor.numpy().copy()

    def apply(self, *jobs: CopyJob) -> None:
        """What these jobs do, one byte range after the other, to the model."""
        for job in jobs:
            for part in job.parts:
                for block_id, slot in zip(part.block_ids, part.slots, strict=True):
                    self._apply_block(job.direction, part.group_id, block_id, slot)

    def _apply_block(
        self, direction: Direction, group_id: int, block_id: int, slot: int
    ) -> None:
        cursor = 0
        for rows in self.shape.groups[group_id]:
            start = rows.start + block_id * rows.stride
            block = self.model_buffers[rows.buffer][start : start + rows.block_bytes]
            record = self.model_pool[slot][cursor : cursor + rows.block_bytes]
            if direction is Direction.STORE:
                record[:] = block
            else:
                block[:] = record
            cursor += rows.block_bytes

    def check(self) -> None:
        """Every byte of the engine's memory and of the pool is the model's."""
        for index, buffer in enumerate(self.buffers):
            wrong = np.flatnonzero(buffer.cpu().numpy() != self.model_buffers[index])
            assert wrong.size == 0, f"buffer {index}: wrong bytes at {wrong[:8]}"
        slots = np.flatnonzero((self.pool.tensor.numpy() != self.model_pool).any(1))
        assert slots.size == 0, f"wrong bytes in slots {slots[:8]}"

    def block(self, group_id: int, block_id: int) -> bytes:
        """A block's bytes now."""
        return b"".join(
            bytes(region[block_id].cpu().numpy()) for region in self.groups[group_id]
        )


def _random(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def store(
    job_id: int, block_ids: Sequence[int], slots: Sequence[int], *, group_id: int = 0
) -> CopyJob:
    return CopyJob(job_id, Direction.STORE, (GroupCopy(group_id, block_ids, slots),))


def load(
    job_id: int, slots: Sequence[int], block_ids: Sequence[int], *, group_id: int = 0
) -> CopyJob:
    return CopyJob(job_id, Direction.LOAD, (GroupCopy(group_id, block_ids, slots),))
