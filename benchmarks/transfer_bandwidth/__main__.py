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
from benchmarks.transfer_bandwidth.measure import (
    LARGE_BLOCK,
    MIB,
    Row,
    Settings,
    measure,
)
from sam_connector.transfer import Direction

AIM = 0.9


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    start = time.monotonic()
    settings = _settings(options)
    rows = measure(settings, note=_note)
    if options.json:
        print(json.dumps(_summary(settings, rows, time.monotonic() - start)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer_bandwidth",
        description="Bandwidth between blocks and host slots, against one large copy "
        "of the same bytes; every byte is checked.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--threads", type=int, default=2, help="that copy on a CPU")
    parser.add_argument(
        "--huge-pages", action="store_true", help="blocks on a CPU lie in huge pages"
    )
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    # Both sides together are many times the last-level cache of any CPU.
    num_bytes = {"cpu": 256 * MIB, "cuda": 2048 * MIB}[options.device]
    return Settings(
        device=torch.device(options.device),
        num_bytes=num_bytes // 4 if options.quick else num_bytes,
        repeats=5 if options.quick else 11,
        num_threads=options.threads,
        huge_pages=options.huge_pages and options.device == "cpu",
    )


def _summary(
    settings: Settings, rows: Sequence[Row], wall_s: float
) -> dict[str, object]:
    idle = [row for row in rows if row.interpreter == "idle"]
    large = [row for row in idle if row.block_bytes >= LARGE_BLOCK]
    busy = [row for row in rows if row.interpreter == "busy"]
    return {
        "benchmark": "transfer_bandwidth",
        "device": settings.device.type,
        "min_ratio_256k_and_above": min(row.ratio for row in large),
        "min_ratio_256k_and_above_by_direction": {
            direction.value: min(
                row.ratio for row in large if row.direction == direction.value
            )
            for direction in Direction
        },
        "min_ratio_same_pieces_256k_and_above": min(
            (row.ratio_same_pieces for row in large if row.ratio_same_pieces),
            default=None,
        ),
        "min_ratio_256k_busy_interpreter": min(
            (row.ratio for row in busy), default=None
        ),
        "aims": {"min_ratio_256k_and_above": AIM},
        "bytes_per_copy": settings.num_bytes,
        "repeats": settings.repeats,
        "threads": settings.num_threads if settings.device.type == "cpu" else None,
        "huge_pages": settings.huge_pages,
        "rows": [asdict(row) for row in rows],
        "torch": torch.__version__,
        "numpy": np.__version__,
        **_gpu(settings.device),
        **machine(),
        # What else ran: this is a measurement of shared memory bandwidth.
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "wall_s": round(wall_s, 1),
    }


def _gpu(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}


def _note(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
