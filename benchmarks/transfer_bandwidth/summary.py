"""The figures that there are aims for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.transfer_bandwidth.block_sizes import SizeRow
from benchmarks.transfer_bandwidth.compute import ComputeRow
from benchmarks.transfer_bandwidth.jobs import JobRow
from benchmarks.transfer_bandwidth.settings import KIB

#: At least so much; ``compute_slowdown`` at most.
AIMS: dict[str, dict[str, float]] = {
    "cpu": {"cpu_vs_memcpy": 0.9, "compute_slowdown": 0.03},
    "cuda": {
        "cuda_vs_contiguous_256k": 0.95,
        "cuda_vs_contiguous_32k": 0.8,
        "compute_slowdown": 0.03,
    },
}

#: From here on a block on a CPU is large enough for the aim.
CPU_BLOCK_BYTES = 64 * KIB


def figures(
    device: str,
    sizes: Sequence[SizeRow],
    jobs: Sequence[JobRow],
    compute: Sequence[ComputeRow],
) -> dict[str, object]:
    """Medians over rows, and ``…_least`` for the worst of them."""
    idle = [row for row in sizes if row.interpreter == "idle"]
    found = _on_cpu(sizes, idle) if device == "cpu" else _on_cuda(idle)
    both = [row.ratio for row in jobs if row.direction == "both"]
    found |= _median_and_least("both_ways_vs_contiguous", both)
    for name, kind in (
        ("compute_slowdown", "arithmetic"),
        ("compute_slowdown_memory_bound", "memory"),
        ("compute_slowdown_interpreter", "interpreter"),
    ):
        # Of the directions, the worst.
        slower = [row.slowdown for row in compute if row.kind == kind]
        found[name] = max(slower, default=None)
    found["compute_slowdown_cpu_time"] = max(
        (row.slowdown_cpu_time for row in compute if row.kind == "arithmetic"),
        default=None,
    )
    return {**found, "aims": AIMS[device]}


def _on_cpu(sizes: Sequence[SizeRow], idle: Sequence[SizeRow]) -> dict[str, object]:
    large = [row for row in idle if row.block_bytes >= CPU_BLOCK_BYTES]
    small = [row for row in idle if row.block_bytes < CPU_BLOCK_BYTES]
    busy = [row.ratio for row in sizes if row.interpreter == "busy"]
    return {
        **_median_and_least("cpu_vs_memcpy", [row.ratio for row in large]),
        **_median_and_least("cpu_vs_memcpy_below_64k", [row.ratio for row in small]),
        **_median_and_least(
            "cpu_vs_memcpy_same_pieces", [row.ratio_same_pieces for row in large]
        ),
        **_median_and_least("cpu_vs_memcpy_busy_interpreter", busy),
    }


def _on_cuda(idle: Sequence[SizeRow]) -> dict[str, object]:
    large = [row for row in idle if row.block_bytes >= 256 * KIB]
    small = [row for row in idle if row.block_bytes == 32 * KIB]
    return {
        **_median_and_least("cuda_vs_contiguous_256k", [row.ratio for row in large]),
        **_median_and_least("cuda_vs_contiguous_32k", [row.ratio for row in small]),
        **_median_and_least(
            "cuda_vs_memcpy_async_32k", [row.ratio_same_pieces for row in small]
        ),
        **_median_and_least(
            "cuda_vs_swap_blocks_32k",
            [row.ratio_swap_blocks for row in small if row.ratio_swap_blocks],
        ),
    }


def _median_and_least(name: str, ratios: Sequence[float]) -> dict[str, object]:
    if not ratios:
        return {}
    return {name: round(statistics.median(ratios), 3), f"{name}_least": min(ratios)}
