"""``python -m benchmarks.core_ops``: see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Before vLLM is imported: its start-up notes are not part of the result.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.core_ops",
        description="CPU time of single operations of the core, and its growth.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    options = parser.parse_args(argv)
    from benchmarks.core_ops.measure import Plan, measure

    summary = measure(Plan(), note=_note)
    print(table(summary))
    if options.json:
        print(json.dumps(summary))
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(summary: Mapping[str, Any]) -> str:
    """What a reader wants: aims, the queues, and one line for each operation."""
    aims = summary["aims"]
    lines = [f"{name:20s} {summary[name]:9.3f}   aim {aims[name]}" for name in aims]
    lines.append(f"\n{'free queue, ns/block':24s}   stock    ours  ratio   claimed")
    for size, found in summary["queues"].items():
        lines.append(
            f"{int(size):24,d} {found['stock_ns']:7.1f} {found['ours_ns']:7.1f}"
            f" {found['ratio']:6.3f}   {found['claimed_ratio']:.3f}"
        )
    sizes = "".join(f"{size:>12,d}" for size in summary["sizes"])
    lines.append(f"\n{'ns/operation':24s}{sizes}  growth")
    for subject, kinds in summary["ns_per_op"].items():
        for kind, found in kinds.items():
            values = "".join(f"{ns:12.0f}" for ns in found)
            lines.append(
                f"{subject + ' ' + kind:24s}{values} {found[-1] / found[0]:7.2f}"
            )
    lines.append("\nsingle steps, us")
    lines += [f"{name:24s}{us:12.1f}" for name, us in summary["steps_us"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
