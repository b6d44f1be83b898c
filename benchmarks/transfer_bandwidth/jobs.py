"""Blocks to slots and back, by size of job; and both ways at once."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.transfer_bandwidth.plain import (
    Copy,
    plain_copy,
    plain_copy_both_ways,
)
from benchmarks.transfer_bandwidth.rig import Arena, Ids, Move, Rig
from benchmarks.transfer_bandwidth.settings import KIB
from benchmarks.transfer_bandwidth.timing import Side, bandwidth_ratio, in_turns
from sam_connector.transfer import Direction

#: The most jobs that are queued at a time.
MAX_JOBS = 256

#: Jobs of each direction when both are under way.
JOBS_EACH_WAY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """Attributes:
    blocks_per_job: in scattered places.
    num_jobs: that were queued together.
    direction: or ``both``.
    ratio: of bandwidths, over the same bytes in one piece (per thread); where the
        direction is ``both``, over one such copy each way at once.
    job_us: from submitting a job to having its result, nothing else queued.
    """

    block_bytes: int
    blocks_per_job: int
    num_jobs: int
    direction: str
    ratio: float
    engine_gb_per_s: float
    plain_gb_per_s: float
    job_us: float | None

    def __str__(self) -> str:
        alone = "" if self.job_us is None else f"{self.job_us:9.0f} us alone"
        return (
            f"{self.block_bytes // KIB:5} KiB  {self.blocks_per_job:5} blocks a job  "
            f"{self.num_jobs:3} jobs  {self.direction:5}  "
            f"{self.engine_gb_per_s:7.2f}  {self.plain_gb_per_s:7.2f}  "
            f"{self.ratio:.3f}{alone}"
        )


def measure(arena: Arena, note: Callable[[object], None]) -> list[JobRow]:
    """All configurations that there is memory for.

    Raises:
        WrongBytesError: a byte is not where it should be.
    """
    rows: list[JobRow] = []
    for block_bytes in arena.settings.some_block_sizes:
        with arena.rig(block_bytes) as rig:
            for size in arena.settings.job_sizes:
                if size > rig.num_blocks:
                    continue
                for direction in Direction:
                    rows.append(_one_way(rig, size, direction))
                    note(rows[-1])
            rows.append(_both_ways(rig))
            note(rows[-1])
    return rows


def _one_way(rig: Rig, size: int, direction: Direction) -> JobRow:
    ids = Ids.of("scattered", rig.num_blocks)
    moves = [Move(direction, part) for part in ids.split(size)]
    num_jobs = min(MAX_JOBS, len(moves))
    # Always other memory, none of it in a cache any more.
    rounds = [moves[at : at + num_jobs] for at in _starts(len(moves), num_jobs)]
    num_bytes = num_jobs * size * rig.block_bytes
    job_bytes = size * rig.block_bytes
    plain = [
        plain_copy(
            *_window(rig, at * num_bytes, num_bytes),
            direction,
            num_threads=rig.num_threads,
        )
        for at in range(len(rounds))
    ]
    times = in_turns(
        {
            "queued": Side(_by_turns(rig, rounds), num_bytes),
            "alone": Side(_by_turns(rig, [[move] for move in moves]), job_bytes),
            "plain": Side(_one_by_one(plain), num_bytes),
        },
        rig.settings.repeats,
    )
    rig.check(rounds[0])
    return JobRow(
        block_bytes=rig.block_bytes,
        blocks_per_job=size,
        num_jobs=num_jobs,
        direction=direction.value,
        ratio=bandwidth_ratio(times["queued"], times["plain"]),
        engine_gb_per_s=times["queued"].gb_per_s,
        plain_gb_per_s=times["plain"].gb_per_s,
        job_us=round(statistics.median(times["alone"].seconds) * 1e6, 1),
    )


def both_ways(rig: Rig) -> list[Move]:
    """Half of the blocks to slots, the other half of the slots back, by turns."""
    ids = Ids.of("scattered", rig.num_blocks)
    half = rig.num_blocks // 2
    size = max(1, half // JOBS_EACH_WAY)
    stores = [Move(Direction.STORE, part) for part in ids[:half].split(size)]
    loads = [Move(Direction.LOAD, part) for part in ids[half:].split(size)]
    return [move for pair in zip(stores, loads, strict=False) for move in pair]


def _both_ways(rig: Rig) -> JobRow:
    moves = both_ways(rig)
    num_bytes = sum(len(move.ids) for move in moves) * rig.block_bytes
    blocks, slots = _window(rig, 0, num_bytes)
    plain = plain_copy_both_ways(blocks, slots, num_threads=rig.num_threads)
    times = in_turns(
        {
            "engine": Side(lambda: rig.run(moves), num_bytes),
            "plain": Side(plain, num_bytes),
        },
        rig.settings.repeats,
    )
    rig.check(moves)
    return JobRow(
        block_bytes=rig.block_bytes,
        blocks_per_job=len(moves[0].ids),
        num_jobs=len(moves),
        direction="both",
        ratio=bandwidth_ratio(times["engine"], times["plain"]),
        engine_gb_per_s=times["engine"].gb_per_s,
        plain_gb_per_s=times["plain"].gb_per_s,
        job_us=None,
    )


def _starts(total: int, size: int) -> range:
    return range(0, total - size + 1, size)


def _window(rig: Rig, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    part = slice(start, start + size)
    return rig.blocks.view(-1)[part], rig.slots.view(-1)[part]


def _by_turns(rig: Rig, rounds: Sequence[Sequence[Move]]) -> Copy:
    turns = itertools.cycle(rounds)
    return lambda: rig.run(next(turns))


def _one_by_one(copies: Sequence[Copy]) -> Copy:
    turns = itertools.cycle(copies)
    return lambda: next(turns)()
