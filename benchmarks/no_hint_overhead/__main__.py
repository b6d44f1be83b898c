"""``python -m benchmarks.no_hint_overhead``: see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence

# Before vLLM is imported: its start-up notes are not part of the result.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MIN_PAIRS = 20


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    from benchmarks.no_hint_overhead.measure import measure

    # Every scheduler that is built says so, and a run builds a hundred.
    logging.disable(logging.WARNING)
    summary = measure(options.pairs, note=_note)
    print(_table(summary))
    if options.json:
        print(json.dumps(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.no_hint_overhead",
        description="CPU time that the connector adds to vLLM's scheduler, against "
        "a connector that does nothing.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    parser.add_argument("--pairs", type=_pairs, default=MIN_PAIRS)
    return parser


def _pairs(text: str) -> int:
    if (pairs := int(text)) < MIN_PAIRS:
        raise argparse.ArgumentTypeError(f"at least {MIN_PAIRS}")
    return pairs


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _table(summary: dict[str, object]) -> str:
    names = (
        "cpu_ratio_stock_self",
        "cpu_ratio_no_hints",
        "cpu_ratio_hints",
        "cpu_ratio_no_hints_tier",
        "cpu_ratio_hints_tier",
        "finish_ratio_4096",
        "cpu_ratio_no_hints_64x128k",
        "cpu_ratio_hints_64x128k",
        "finish_ratio_no_hints_64x128k",
        "finish_ratio_hints_64x128k",
    )
    aims = summary["aims"]
    assert isinstance(aims, dict)
    lines = [f"{'':30s}  median   p10..p90            aim"]
    for name in names:
        spread = summary[f"{name}_p10_p90"]
        assert isinstance(spread, list)
        lines.append(
            f"{name:30s}  {summary[name]:6.4f}   {spread[0]:.4f}..{spread[1]:.4f}"
            f"      {aims.get(name, '-')}"
        )
    lines.append(
        f"{'worst_step_ms':30s}  {summary['worst_step_ms']:6.3f}   "
        f"traffic alone {summary['worst_step_traffic_only_ms']:.3f}"
    )
    lines.append(
        f"{'metadata_bytes_per_block':30s}  "
        f"{summary['metadata_bytes_per_block']:6.1f}   "
        f"vLLM's own {summary['metadata_bytes_per_block_stock']:.1f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
