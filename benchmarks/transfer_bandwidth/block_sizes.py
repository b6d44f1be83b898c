"""Blocks to slots and back, by size of block: everything in one job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.transfer_bandwidth.plain import plain_copy, single_copies, swap_blocks
from benchmarks.transfer_bandwidth.rig import Arena, Ids, Move, Rig
from benchmarks.transfer_bandwidth.settings import KIB
from benchmarks.transfer_bandwidth.timing import Side, Times, bandwidth_ratio, in_turns
from sam_connector.transfer import Direction

#: With these, the interpreter is kept busy once as well.
BUSY_BLOCK_BYTES = 256 * KIB

#: The most copies that a side makes one by one: it would take too long otherwise.
MAX_SINGLE_COPIES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """One configuration; ratios are of bandwidths, the engine's over another.

    Attributes:
        interpreter: ``busy`` beside a thread of pure Python, else ``idle``.
        ratio: over the same bytes in one piece (per thread). This is the aim's.
        ratio_same_pieces: over one call for each block: ``memcpy`` on a CPU,
            ``cudaMemcpyAsync`` on a GPU.
        ratio_swap_blocks: on a GPU, over vLLM's ``swap_blocks``.
        swap_blocks_by: ``vllm``, or ``torch`` where there is no vLLM.
    """

    block_bytes: int
    ids: str
    direction: str
    interpreter: str
    ratio: float
    ratio_same_pieces: float
    ratio_swap_blocks: float | None
    swap_blocks_by: str | None
    engine_gb_per_s: float
    plain_gb_per_s: float

    def __str__(self) -> str:
        swap = "" if self.ratio_swap_blocks is None else f" {self.ratio_swap_blocks:7}"
        return (
            f"{self.block_bytes // KIB:5} KiB  {self.ids:10}  {self.direction:5}  "
            f"{self.interpreter:4}  {self.engine_gb_per_s:7.2f}  "
            f"{self.plain_gb_per_s:7.2f}  {self.ratio:.3f}  "
            f"{self.ratio_same_pieces:7.3f}{swap}"
        )


def measure(arena: Arena, note: Callable[[object], None]) -> list[SizeRow]:
    """All configurations.

    Raises:
        WrongBytesError: a byte is not where it should be.
    """
    rows: list[SizeRow] = []
    for block_bytes in arena.settings.block_sizes:
        with arena.rig(block_bytes) as rig:
            for ids in ("contiguous", "scattered"):
                for direction in Direction:
                    rows.append(_row(rig, ids, direction))
                    note(rows[-1])
            if block_bytes == BUSY_BLOCK_BYTES and not rig.blocks.is_cuda:
                for direction in Direction:
                    rows.append(_row(rig, "scattered", direction, is_busy=True))
                    note(rows[-1])
    return rows


def _row(
    rig: Rig, kind: str, direction: Direction, *, is_busy: bool = False
) -> SizeRow:
    ids = Ids.of(kind, rig.num_blocks)
    sides, swap_blocks_by = _sides(rig, ids, direction)
    if is_busy:
        sides = {
            name: replace(side, run=_beside_python(side.run))
            for name, side in sides.items()
        }
    times = in_turns(sides, rig.settings.repeats)
    rig.check([Move(direction, ids)])
    ratios = _ratios(times)
    return SizeRow(
        block_bytes=rig.block_bytes,
        ids=kind,
        direction=direction.value,
        interpreter="busy" if is_busy else "idle",
        ratio=ratios["plain"],
        ratio_same_pieces=ratios["pieces"],
        ratio_swap_blocks=ratios.get("swap"),
        swap_blocks_by=swap_blocks_by,
        engine_gb_per_s=times["engine"].gb_per_s,
        plain_gb_per_s=times["plain"].gb_per_s,
    )


def _ratios(times: Mapping[str, Times]) -> dict[str, float]:
    return {
        name: bandwidth_ratio(times["engine"], other)
        for name, other in times.items()
        if name != "engine"
    }


def _sides(
    rig: Rig, ids: Ids, direction: Direction
) -> tuple[dict[str, Side], str | None]:
    total, num_threads = rig.settings.num_bytes, rig.num_threads
    blocks, slots = rig.blocks.view(-1), rig.slots.view(-1)
    plain = plain_copy(blocks, slots, direction, num_threads=num_threads)
    sides = {
        "engine": Side(lambda: rig.run([Move(direction, ids)]), total),
        "plain": Side(plain, total),
    }
    if not rig.blocks.is_cuda:
        pieces = plain_copy(
            blocks,
            slots,
            direction,
            num_threads=num_threads,
            piece_bytes=rig.block_bytes,
        )
        return {**sides, "pieces": Side(pieces, total)}, None
    some = ids[:MAX_SINGLE_COPIES]
    num_bytes = len(some) * rig.block_bytes
    single = single_copies(rig.blocks, rig.slots, direction, some)
    swap, swap_by = swap_blocks(rig.blocks, rig.slots, direction, some)
    others = {"pieces": Side(single, num_bytes), "swap": Side(swap, num_bytes)}
    return {**sides, **others}, swap_by


def _beside_python(function: Callable[[], None]) -> Callable[[], None]:
    """The same while another thread computes in pure Python, as an engine's may."""

    def run() -> None:
        thread = threading.Thread(target=function)
        thread.start()
        counter = 0
        while thread.is_alive():
            counter += 1

    return run
