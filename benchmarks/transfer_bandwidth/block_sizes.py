"""Blocks to slots and back, against one large copy of the same bytes."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.transfer_bandwidth.plain import plain_copy
from sam_connector.transfer import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    HostPool,
    SlotLayout,
    make_copy_engine,
)

KIB, MIB = 1 << 10, 1 << 20
BLOCK_SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LARGE_BLOCK = 256 * KIB
PATIENCE_S = 120.0


class WrongBytesError(RuntimeError):
    """A copy did not arrive as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Attributes:
    device: where the blocks lie.
    num_bytes: moved by each copy: all the blocks and all the slots.
    repeats: of each side, in turns.
    num_threads: that copy on a CPU.
    huge_pages: for the blocks, if they lie on a CPU; the slots ask for them anyway.
    block_sizes: in bytes, each a divisor of ``num_bytes``.
    """

    device: torch.device
    num_bytes: int
    repeats: int
    num_threads: int
    huge_pages: bool = False
    block_sizes: tuple[int, ...] = BLOCK_SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration; ratios are of bandwidths, the engine's over another.

    Attributes:
        ratio: over one large copy per thread.
        ratio_same_pieces: over ``memcpy`` calls of ``block_bytes``; ``None`` on a GPU.
    """

    block_bytes: int
    ids: str
    direction: str
    interpreter: str
    ratio: float
    ratio_same_pieces: float | None
    engine_gb_per_s: float
    plain_gb_per_s: float


def measure(settings: Settings, note: Callable[[str], None]) -> list[Row]:
    """All configurations.

    Raises:
        WrongBytesError: a byte is not where it should be.
    """
    rows = []
    blocks = _block_memory(settings)
    for block_bytes in settings.block_sizes:
        with _Bench.running(blocks, block_bytes, settings) as bench:
            for ids in ("contiguous", "scattered"):
                for direction in Direction:
                    rows.append(bench.row(ids, direction))
                    note(_line(rows[-1]))
            if block_bytes == LARGE_BLOCK and settings.device.type == "cpu":
                for direction in Direction:
                    rows.append(bench.row("scattered", direction, is_busy=True))
                    note(_line(rows[-1]))
    return rows


def _block_memory(settings: Settings) -> torch.Tensor:
    if settings.huge_pages:
        return HostPool(1, settings.num_bytes).tensor.view(-1)
    # Zeros would do on a GPU; a CPU reads untouched pages from one page of zeros.
    memory = torch.empty(settings.num_bytes, dtype=torch.uint8, device=settings.device)
    return memory.fill_(1)


def _line(row: Row) -> str:
    return (
        f"{row.block_bytes // KIB:5d} KiB  {row.ids:10s}  {row.direction:5s}  "
        f"{row.interpreter:4s}  {row.engine_gb_per_s:6.2f} GB/s  "
        f"plain {row.plain_gb_per_s:6.2f}  ratio {row.ratio:.3f}  "
        f"same pieces {row.ratio_same_pieces or 0:.3f}"
    )


class _Bench:
    """One block size: the memory, the engine, and the two sides of each pair."""

    def __init__(
        self,
        blocks: torch.Tensor,
        pool: HostPool,
        engine: CopyEngine,
        settings: Settings,
    ) -> None:
        self._blocks = blocks
        self._slots = pool.tensor
        self._engine = engine
        self._settings = settings
        self._job_id = 0

    @classmethod
    @contextmanager
    def running(
        cls, memory: torch.Tensor, block_bytes: int, settings: Settings
    ) -> Iterator[_Bench]:
        blocks = memory.view(-1, block_bytes)
        groups = {0: (blocks,)}
        layout = SlotLayout.of(groups)
        pool = HostPool(len(blocks), layout.slot_bytes, pin=memory.is_cuda)
        engine = make_copy_engine(
            groups,
            layout,
            pool,
            device=settings.device,
            num_threads=settings.num_threads,
        )
        try:
            yield cls(blocks, pool, engine, settings)
        finally:
            engine.close()
            pool.close()

    def row(self, ids: str, direction: Direction, *, is_busy: bool = False) -> Row:
        """Measures the sides in turns, then checks every byte."""
        block_ids, slots = _ids(ids, len(self._blocks))
        parts = (GroupCopy(0, block_ids, slots),)
        sides = self._sides(direction, parts)
        if is_busy:
            sides = {name: _beside_python(copy) for name, copy in sides.items()}
        seconds = _in_turns(sides, self._settings.repeats)
        self._check(direction, parts)
        giga = self._settings.num_bytes / 1e9
        return Row(
            block_bytes=self._blocks.shape[1],
            ids=ids,
            direction=direction.value,
            interpreter="busy" if is_busy else "idle",
            ratio=_ratio(seconds["plain"], seconds["engine"]),
            ratio_same_pieces=_ratio(seconds["pieces"], seconds["engine"])
            if "pieces" in seconds
            else None,
            engine_gb_per_s=round(giga / statistics.median(seconds["engine"]), 2),
            plain_gb_per_s=round(giga / statistics.median(seconds["plain"]), 2),
        )

    def _sides(
        self, direction: Direction, parts: tuple[GroupCopy, ...]
    ) -> dict[str, Callable[[], None]]:
        plain = partial(
            plain_copy,
            self._blocks.view(-1),
            self._slots.view(-1),
            direction,
            num_threads=self._settings.num_threads,
        )
        sides: dict[str, Callable[[], None]] = {
            "engine": lambda: self._run(direction, parts),
            "plain": plain(),
        }
        if not self._blocks.is_cuda:
            sides["pieces"] = plain(piece_bytes=self._blocks.shape[1])
        return sides

    def _run(self, direction: Direction, parts: tuple[GroupCopy, ...]) -> None:
        self._job_id += 1
        self._engine.submit(CopyJob(self._job_id, direction, parts))
        if not self._engine.drain(PATIENCE_S):
            raise TimeoutError("a copy does not end")
        (result,) = self._engine.poll()
        if result.error:
            raise RuntimeError(result.error)

    def _check(self, direction: Direction, parts: tuple[GroupCopy, ...]) -> None:
        """Fills the source at random, clears the target, copies, compares all."""
        source, target = self._blocks, self._slots
        if direction is Direction.LOAD:
            source, target = target, source
        source.view(-1).view(torch.int64).random_()
        target.zero_()
        self._run(direction, parts)
        (part,) = parts
        for start in range(0, len(part.slots), 64):
            block_ids = list(part.block_ids[start : start + 64])
            slots = list(part.slots[start : start + 64])
            if not torch.equal(self._blocks[block_ids].cpu(), self._slots[slots]):
                raise WrongBytesError(f"{direction.value}: blocks {block_ids}")


def _beside_python(function: Callable[[], None]) -> Callable[[], None]:
    """The same while another thread computes in pure Python, as an engine's may."""

    def run() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        counter = 0
        while thread.is_alive():
            counter += 1

    return run


def _ids(kind: str, count: int) -> tuple[list[int], list[int]]:
    block_ids, slots = list(range(count)), list(range(count))
    if kind == "scattered":
        rng = random.Random(count)
        rng.shuffle(block_ids)
        rng.shuffle(slots)
    return block_ids, slots


def _in_turns(
    sides: dict[str, Callable[[], None]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each side, every other round in the opposite order; one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in sorted(sides, reverse=repeat % 2 == 1):
            start = time.perf_counter()
            sides[name]()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _ratio(other_s: list[float], engine_s: list[float]) -> float:
    ratios = [other / ours for other, ours in zip(other_s, engine_s, strict=True)]
    return round(statistics.median(ratios), 3)
