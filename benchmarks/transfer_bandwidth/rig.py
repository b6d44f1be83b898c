"""Blocks of one size, as many slots, a copy engine between, a check of every byte."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.transfer_bandwidth.settings import Settings
from sam_connector.transfer import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    HostPool,
    SlotLayout,
    make_copy_engine,
)

PATIENCE_S = 120.0


class WrongBytesError(RuntimeError):
    """A copy did not arrive as it was, or something else was written."""


@dataclass(frozen=True, slots=True)
class Ids:
    """Blocks and the slot of each."""

    block_ids: list[int]
    slots: list[int]

    @classmethod
    def of(cls, kind: str, count: int) -> Ids:
        """All of ``count``, ``contiguous`` or ``scattered`` on both sides."""
        block_ids, slots = list(range(count)), list(range(count))
        if kind == "scattered":
            rng = random.Random(count)
            rng.shuffle(block_ids)
            rng.shuffle(slots)
        return cls(block_ids, slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, part: slice) -> Ids:
        return Ids(self.block_ids[part], self.slots[part])

    def split(self, size: int) -> list[Ids]:
        """In jobs of ``size``; what is left over is left out."""
        return [self[start : start + size] for start in self._starts(size)]

    def _starts(self, size: int) -> range:
        return range(0, len(self) - size + 1, size)


@dataclass(frozen=True, slots=True)
class Move:
    """One job to be."""

    direction: Direction
    ids: Ids


class Arena:
    """The engine's memory, whatever the size of its blocks, and what to fill it with.

    Attributes:
        memory: the bytes of all blocks.
        block_bytes: what blocks are filled with before a check.
        slot_bytes: the same of slots; on the blocks' device.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory = _block_memory(settings)
        self.block_bytes = _random_like(self.memory, seed=1)
        self.slot_bytes = _random_like(self.memory, seed=2)

    @contextmanager
    def rig(self, block_bytes: int, *, num_threads: int | None = None) -> Iterator[Rig]:
        """The same memory in blocks of this size.

        Args:
            block_bytes: a divisor of all bytes.
            num_threads: that copy on a CPU, if not as many as usual.
        """
        num_threads = num_threads or self.settings.num_threads
        blocks = self.memory.view(-1, block_bytes)
        groups = {0: (blocks,)}
        layout = SlotLayout.of(groups)
        pool = HostPool(len(blocks), layout.slot_bytes, pin=blocks.is_cuda)
        engine = make_copy_engine(
            groups,
            layout,
            pool,
            device=blocks.device,
            num_threads=num_threads,
        )
        try:
            yield Rig(self, blocks, pool.tensor, engine, num_threads)
        finally:
            engine.close()
            pool.close()


class Rig:
    """What is measured.

    Attributes:
        blocks: a row each.
        slots: as many, of the same size.
        num_threads: that copy on a CPU.
    """

    def __init__(
        self,
        arena: Arena,
        blocks: torch.Tensor,
        slots: torch.Tensor,
        engine: CopyEngine,
        num_threads: int,
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self.num_threads = num_threads
        self._arena = arena
        self._engine = engine
        self._num_jobs = 0

    @property
    def block_bytes(self) -> int:
        return self.blocks.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def settings(self) -> Settings:
        return self._arena.settings

    def submit(self, moves: Sequence[Move]) -> None:
        for move in moves:
            part = GroupCopy(0, move.ids.block_ids, move.ids.slots)
            self._num_jobs += 1
            self._engine.submit(CopyJob(self._num_jobs, move.direction, (part,)))

    def finish(self, count: int) -> None:
        """Waits for all that was submitted, which must be ``count`` jobs, and well."""
        if not self._engine.drain(PATIENCE_S):
            raise TimeoutError("a copy does not end")
        results = self._engine.poll()
        if errors := [result.error for result in results if result.error]:
            raise RuntimeError(errors[0])
        if len(results) != count:
            raise RuntimeError(f"{len(results)} results for {count} jobs")

    def is_copying(self) -> bool:
        return not self._engine.drain(0)

    def run(self, moves: Sequence[Move]) -> None:
        self.submit(moves)
        self.finish(len(moves))

    def check(self, moves: Sequence[Move]) -> None:
        """Fills everything anew, runs the moves, and compares every byte there is.

        Raises:
            WrongBytesError: something is not as the moves in their order make it.
        """
        blocks = self._arena.block_bytes.view_as(self.blocks)
        slots = self._arena.slot_bytes.view_as(self.blocks)
        self.blocks.copy_(blocks)
        self.slots.copy_(slots)
        if self.blocks.is_cuda:
            torch.cuda.synchronize()
        self.run(moves)
        blocks, slots = blocks.clone(), slots.clone()
        for move in moves:
            _move_by_torch(blocks, slots, move)
        for name, found, expected in (
            ("blocks", self.blocks, blocks),
            ("slots", self.slots.to(blocks.device), slots),
        ):
            if not torch.equal(found, expected):
                wrong = int((found != expected).any(1).sum())
                kinds = sorted({move.direction.value for move in moves})
                raise WrongBytesError(f"{'+'.join(kinds)}: {wrong} {name} are wrong")


def _move_by_torch(blocks: torch.Tensor, slots: torch.Tensor, move: Move) -> None:
    source, target = blocks.view(torch.int64), slots.view(torch.int64)
    source_ids, target_ids = move.ids.block_ids, move.ids.slots
    if move.direction is Direction.LOAD:
        source, target = target, source
        source_ids, target_ids = target_ids, source_ids
    from_, to = (
        torch.tensor(ids, device=blocks.device) for ids in (source_ids, target_ids)
    )
    target.index_copy_(0, to, source.index_select(0, from_))


def _block_memory(settings: Settings) -> torch.Tensor:
    if settings.huge_pages:
        return HostPool(1, settings.num_bytes).tensor.view(-1)
    # Zeros would do on a GPU; a CPU reads untouched pages from one page of zeros.
    memory = torch.empty(settings.num_bytes, dtype=torch.uint8, device=settings.device)
    return memory.fill_(1)


def _random_like(memory: torch.Tensor, *, seed: int) -> torch.Tensor:
    generator = torch.Generator(memory.device).manual_seed(seed)
    filled = torch.empty_like(memory)
    # Eight bytes at a time; of the sign nobody cares.
    filled.view(torch.int64).random_(generator=generator)
    return filled
