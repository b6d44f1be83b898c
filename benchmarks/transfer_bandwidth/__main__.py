"""``python -m benchmarks.transfer_bandwidth``: see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from benchmarks.common import machine
from benchmarks.transfer_bandwidth import (
    block_sizes,
    compute,
    jobs,
    store_path,
    summary,
)
from benchmarks.transfer_bandwidth.rig import Arena
from benchmarks.transfer_bandwidth.settings import Settings
from sam_connector.errors import ConfigurationError

NO_DEVICE = 2
STORE_ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA device here", file=sys.stderr)
        return NO_DEVICE
    start = time.monotonic()
    result = _measure(Settings.of(options), has_store=not options.no_store)
    if options.json:
        seconds = round(time.monotonic() - start, 1)
        print(json.dumps(result | {"wall_s": seconds}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer_bandwidth",
        description="Bandwidth between blocks, host slots and a store, against one "
        "large copy of the same bytes; every byte is checked.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--threads", type=int, default=2, help="that copy on a CPU")
    parser.add_argument(
        "--huge-pages", action="store_true", help="blocks on a CPU lie in huge pages"
    )
    parser.add_argument(
        "--no-store", action="store_true", help="leave the store out of it"
    )
    return parser


def _measure(settings: Settings, *, has_store: bool) -> dict[str, object]:
    arena = Arena(settings)
    _title("by size of block: GB/s ours, GB/s in one piece, ratio, ratio to single")
    sizes = block_sizes.measure(arena, _note)
    _title("by size of job: GB/s ours, GB/s in one piece, ratio")
    job_rows = jobs.measure(arena, _note)
    _title("beside computing")
    compute_rows = compute.measure(arena, _note)
    device = settings.device.type
    return {
        "benchmark": "transfer_bandwidth",
        "device": device,
        **summary.figures(device, sizes, job_rows, compute_rows),
        **(_whole_path(settings.device) if has_store else {}),
        "num_bytes": settings.num_bytes,
        "repeats": settings.repeats,
        "threads": settings.num_threads if device == "cpu" else None,
        "huge_pages": settings.huge_pages,
        "rows": [asdict(row) for row in sizes],
        "job_rows": [asdict(row) for row in job_rows],
        "compute_rows": [asdict(row) for row in compute_rows],
        "torch": torch.__version__,
        "numpy": np.__version__,
        **_gpu(settings.device),
        **machine(),
        # What else ran: this is a measurement of shared memory bandwidth.
        "load_average_at_end": round(os.getloadavg()[0], 2),
    }


def _whole_path(device: torch.device) -> dict[str, object]:
    _title("to a store and back: GB/s")
    try:
        rates = store_path.measure(device, STORE_ROUNDS)
    except (ImportError, ConfigurationError) as error:
        _note(f"left out: {error}")
        return {"whole_path_left_out": str(error)}
    for name, rate in rates.items():
        _note(f"{name:16}  {rate:7.3f}")
    return {**store_path.figures(rates), "whole_path_gb_s": rates}


def _gpu(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def _title(text: str) -> None:
    print(f"--- {text}", flush=True)


def _note(line: object) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
