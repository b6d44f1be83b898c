"""How much slower computing gets while blocks are copied beside it."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.transfer_bandwidth.jobs import both_ways
from benchmarks.transfer_bandwidth.rig import Arena, Ids, Move, Rig
from benchmarks.transfer_bandwidth.settings import KIB, MIB, Settings
from benchmarks.transfer_bandwidth.timing import slowdown
from sam_connector.transfer import Direction

BLOCK_BYTES = 256 * KIB

#: Small enough to be queued while one of them runs.
JOBS_OF_ALL_BLOCKS = 4

#: Copies are queued for this many times as long as the computing takes alone.
COPY_AMPLY = 2.0

_CALIBRATION_STEPS = 5
_PYTHON_STEPS = 2_000

#: Untyped: builds of torch without CUDA describe stand-ins for its streams.
_cuda: Any = torch.cuda

Step = Callable[[], object]
#: Seconds that so many steps take, and of those the seconds of its own processor.
Clock = Callable[[Step, int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Work:
    """``count`` steps of one kind of computing, and how to time them."""

    kind: str
    step: Step
    clock: Clock
    count: int

    @classmethod
    def of(cls, kind: str, step: Step, clock: Clock, *, target_s: float) -> Work:
        """As many steps as take about so long alone."""
        clock(step, _CALIBRATION_STEPS)
        took_s, _ = clock(step, _CALIBRATION_STEPS)
        count = max(1, round(_CALIBRATION_STEPS * target_s / took_s))
        return cls(kind, step, clock, count)

    def run(self) -> tuple[float, float]:
        return self.clock(self.step, self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRow:
    """Attributes:
    kind: ``arithmetic`` (a product of matrices), ``memory`` (far more memory than
        any cache is read and written) or ``interpreter`` (pure Python).
    direction: of the copies, or ``both``.
    copy_threads: on a CPU.
    slowdown: 0.02 means that the same took 2 % longer, median over pairs.
    slowdown_cpu_time: the same of the processor's time that the computing thread
        used: what copies do to it through caches and memory, whoever else wants its
        core. The same as ``slowdown`` on a GPU.
    covered: the share of the rounds in which copies outlasted the computing; 1.0
        or the slowdown is that of a part of it.
    """

    kind: str
    direction: str
    copy_threads: int | None
    alone_ms: float
    beside_ms: float
    slowdown: float
    slowdown_cpu_time: float
    covered: float

    def __str__(self) -> str:
        return (
            f"{self.kind:11}  {self.direction:5}  alone {self.alone_ms:7.2f} ms  "
            f"beside copies {self.beside_ms:7.2f} ms  slower by {self.slowdown:.2%}  "
            f"({self.slowdown_cpu_time:.2%} of its processor's time)  "
            f"covered {self.covered:.0%}"
        )


def measure(arena: Arena, note: Callable[[object], None]) -> list[ComputeRow]:
    """Every kind beside copies both ways, arithmetic beside copies one way as well.

    On a CPU, computing has one core and copies have the others.

    Raises:
        WrongBytesError: a byte is not where it should be.
    """
    other_cores = max(1, (os.cpu_count() or 1) - 1)
    num_threads = min(arena.settings.num_threads, other_cores)
    rows: list[ComputeRow] = []
    with _one_compute_thread(), arena.rig(BLOCK_BYTES, num_threads=num_threads) as rig:
        copies = _copies(rig)
        for work in _works(arena.settings):
            for direction, moves in copies.items():
                if work.kind == "arithmetic" or direction == "both":
                    rows.append(_row(rig, work, direction, moves))
                    note(rows[-1])
        for moves in copies.values():
            rig.check(moves)
    return rows


def _row(rig: Rig, work: Work, direction: str, moves: list[Move]) -> ComputeRow:
    queue = _enough(rig, moves, work.run()[0])
    alone: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    num_covered, repeats = 0, rig.settings.repeats
    for repeat in range(repeats):
        for is_alone in (repeat % 2 == 0, repeat % 2 == 1):
            if is_alone:
                alone.append(work.run())
                continue
            rig.submit(queue)
            beside.append(work.run())
            num_covered += rig.is_copying()
            rig.finish(len(queue))
    (alone_s, alone_cpu_s), (beside_s, beside_cpu_s) = (
        zip(*times, strict=True) for times in (alone, beside)
    )
    return ComputeRow(
        kind=work.kind,
        direction=direction,
        copy_threads=None if rig.blocks.is_cuda else rig.num_threads,
        alone_ms=round(statistics.median(alone_s) * 1e3, 3),
        beside_ms=round(statistics.median(beside_s) * 1e3, 3),
        slowdown=slowdown(alone_s, beside_s),
        slowdown_cpu_time=slowdown(alone_cpu_s, beside_cpu_s),
        covered=round(num_covered / repeats, 3),
    )


def _copies(rig: Rig) -> dict[str, list[Move]]:
    ids = Ids.of("scattered", rig.num_blocks)
    size = max(1, rig.num_blocks // JOBS_OF_ALL_BLOCKS)
    one_way = {
        direction.value: [Move(direction, part) for part in ids.split(size)]
        for direction in Direction
    }
    return {**one_way, "both": both_ways(rig)}


def _enough(rig: Rig, moves: list[Move], compute_s: float) -> list[Move]:
    """The same moves again and again, for longer than the computing takes."""
    start = time.perf_counter()
    rig.run(moves)
    copy_s = time.perf_counter() - start
    return moves * math.ceil(COPY_AMPLY * compute_s / copy_s + 1)


def _works(settings: Settings) -> list[Work]:
    device = settings.device
    if device.type == "cuda":
        size, dtype, num_bytes, clock = 4096, torch.bfloat16, 512 * MIB, _gpu_clock()
    else:
        # Three matrices that fit the second-level cache of a core.
        size, dtype, num_bytes, clock = 256, torch.float32, 64 * MIB, _cpu_clock
    left, right, product = (
        torch.rand(size, size, device=device).to(dtype) for _ in range(3)
    )
    first = torch.ones(num_bytes // 4, device=device)
    second = torch.ones_like(first)
    kinds: dict[str, tuple[Step, Clock]] = {
        "arithmetic": (lambda: torch.mm(left, right, out=product), clock),
        "memory": (lambda: torch.add(first, 1.0, out=second), clock),
        "interpreter": (_count, _cpu_clock),
    }
    return [
        Work.of(kind, *parts, target_s=settings.compute_s)
        for kind, parts in kinds.items()
    ]


def _count() -> int:
    counter = 0
    for _ in range(_PYTHON_STEPS):
        counter += 1
    return counter


def _cpu_clock(step: Step, count: int) -> tuple[float, float]:
    start, cpu_start = time.perf_counter(), time.thread_time()
    for _ in range(count):
        step()
    return time.perf_counter() - start, time.thread_time() - cpu_start


def _gpu_clock() -> Clock:
    # Not the current stream, which copies wait for when they are submitted.
    stream = _cuda.Stream()

    def clock(step: Step, count: int) -> tuple[float, float]:
        begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
        with _cuda.stream(stream):
            begin.record()
            for _ in range(count):
                step()
            end.record()
        end.synchronize()
        elapsed_s = float(begin.elapsed_time(end)) / 1e3
        return elapsed_s, elapsed_s

    return clock


@contextlib.contextmanager
def _one_compute_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
