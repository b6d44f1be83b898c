from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from benchmarks.transfer_bandwidth.block_sizes import SizeRow
from benchmarks.transfer_bandwidth.compute import ComputeRow
from benchmarks.transfer_bandwidth.jobs import JobRow
from benchmarks.transfer_bandwidth.settings import KIB
from benchmarks.transfer_bandwidth.summary import AIMS, figures


def _size(
    block_kib: int,
    ratio: float,
    *,
    interpreter: str = "idle",
    pieces: float = 1.0,
    swap: float | None = None,
) -> SizeRow:
    return SizeRow(
        block_bytes=block_kib * KIB,
        ids="scattered",
        direction="store",
        interpreter=interpreter,
        ratio=ratio,
        ratio_same_pieces=pieces,
        ratio_swap_blocks=swap,
        swap_blocks_by=None,
        engine_gb_per_s=1.0,
        plain_gb_per_s=1.0,
    )


def _job(direction: str, ratio: float) -> JobRow:
    return JobRow(
        block_bytes=KIB,
        blocks_per_job=1,
        num_jobs=1,
        direction=direction,
        ratio=ratio,
        engine_gb_per_s=1.0,
        plain_gb_per_s=1.0,
        job_us=1.0,
    )


def _compute(kind: str, slowdown: float) -> ComputeRow:
    return ComputeRow(
        kind=kind,
        direction="both",
        copy_threads=1,
        alone_ms=1.0,
        beside_ms=1.0,
        slowdown=slowdown,
        slowdown_cpu_time=slowdown / 2,
        covered=1.0,
    )


SIZES: Sequence[SizeRow] = [
    _size(16, 0.1),
    _size(32, 0.3, pieces=2.0, swap=4.0),
    _size(64, 0.7, pieces=0.9),
    _size(256, 0.9, pieces=1.1),
    _size(256, 0.2, interpreter="busy"),
    _size(4096, 1.0, pieces=1.0),
]
JOBS = [_job("both", 0.8), _job("both", 0.6), _job("store", 0.1)]
COMPUTE = [
    _compute("arithmetic", 0.01),
    _compute("arithmetic", 0.02),
    _compute("memory", 0.4),
    _compute("interpreter", 0.1),
]


def test_on_a_cpu_the_aim_is_about_blocks_of_64_kib_and_above() -> None:
    assert figures("cpu", SIZES, JOBS, COMPUTE) == {
        "cpu_vs_memcpy": 0.9,
        "cpu_vs_memcpy_least": 0.7,
        "cpu_vs_memcpy_below_64k": 0.2,
        "cpu_vs_memcpy_below_64k_least": 0.1,
        "cpu_vs_memcpy_same_pieces": 1.0,
        "cpu_vs_memcpy_same_pieces_least": 0.9,
        "cpu_vs_memcpy_busy_interpreter": 0.2,
        "cpu_vs_memcpy_busy_interpreter_least": 0.2,
        "both_ways_vs_contiguous": 0.7,
        "both_ways_vs_contiguous_least": 0.6,
        "compute_slowdown": 0.02,
        "compute_slowdown_cpu_time": 0.01,
        "compute_slowdown_memory_bound": 0.4,
        "compute_slowdown_interpreter": 0.1,
        "aims": AIMS["cpu"],
    }


def test_on_a_gpu_there_are_two_sizes_and_two_other_ways() -> None:
    found = figures("cuda", SIZES, JOBS, COMPUTE)
    assert found["cuda_vs_contiguous_256k"] == 0.95
    assert found["cuda_vs_contiguous_256k_least"] == 0.9
    assert found["cuda_vs_contiguous_32k"] == 0.3
    assert found["cuda_vs_memcpy_async_32k"] == 2.0
    assert found["cuda_vs_swap_blocks_32k"] == 4.0
    assert not any(name.startswith("cpu") for name in found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_aim_has_its_figure(device: str) -> None:
    found = figures(device, SIZES, JOBS, COMPUTE)
    assert AIMS[device].keys() <= found.keys()
