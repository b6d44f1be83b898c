"""``python -m benchmarks.trace_replay``: see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import TRACES_DIR, machine

# Before vLLM is imported: its start-up notes are not part of the result.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

DEFAULT_TRACE = TRACES_DIR / "coding_agents.jsonl"
DEFAULT_POOLS = (100_000, 150_000, 250_000)
COLUMNS = (
    ("hit", "hit", "{:.4f}"),
    ("recomputed", "recomputed_tokens", "{:,}"),
    ("TTFT mean s", "ttft_mean_s", "{:.3f}"),
    ("p50 s", "ttft_p50_s", "{:.3f}"),
    ("p99 s", "ttft_p99_s", "{:.2f}"),
    ("use peak", "use_peak", "{:.2f}"),
    ("use mean", "use_mean", "{:.2f}"),
    ("preempted", "num_preemptions", "{}"),
    ("leases broken", "leases_broken", "{:,}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    from vllm import __version__ as vllm_version

    from benchmarks.trace_replay.records import ServiceModel
    from benchmarks.trace_replay.runs import as_json, jittered, run_pool
    from benchmarks.trace_replay.sam_policy import HintRules
    from benchmarks.trace_replay.workload import build_workload, read_trace

    started_s = time.monotonic()
    rows = read_trace(options.trace)
    workload = build_workload(rows, block_size=options.block_size)
    rules = HintRules(
        tool_ttl_s=options.tool_ttl or None,
        wait_ttl_s=options.wait_ttl,
        evict_at_end=not options.no_evict,
        name_side_calls=options.name_side_calls,
    )
    service = ServiceModel(
        prefill_tokens_per_s=options.prefill_rate,
        decode_step_s=options.decode_step_ms / 1_000,
    )
    draws = [workload, *(jittered(workload, seed) for seed in range(options.jitter))]
    pools = {}
    for gpu_tokens in options.gpu_tokens:
        reports = [
            run_pool(draw, gpu_tokens, rules=rules, service=service, note=_note)
            for draw in draws
        ]
        result = as_json(reports[0])
        if options.jitter:
            gaps = [report.gap_closed for report in reports[1:]]
            result["jittered_gap_closed"] = {
                "runs": len(gaps),
                "mean": round(statistics.fmean(gaps), 4),
                "min": round(min(gaps), 4),
            }
        pools[str(gpu_tokens)] = result
        print(_table(result))
    if options.json:
        summary = {
            "benchmark": "trace_replay",
            "requests": len(rows),
            "input_tokens": sum(row.input_tokens for row in rows),
            "block_size": options.block_size,
            "prefill_tokens_per_s": service.prefill_tokens_per_s,
            "decode_step_s": service.decode_step_s,
            "tool_ttl_s": rules.tool_ttl_s,
            "wait_ttl_s": rules.wait_ttl_s,
            "evict_at_end": rules.evict_at_end,
            "name_side_calls": rules.name_side_calls,
            "vllm": vllm_version,
            **machine(),
            "wall_s": round(time.monotonic() - started_s, 1),
            "pools": pools,
        }
        print(json.dumps(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_replay",
        description="Replays an agent trace on vLLM's KV cache manager, in virtual "
        "time: stock LRU, ours without and with hints, and the clairvoyant bound.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--trace", type=Path, default=DEFAULT_TRACE, help="JSON lines")
    add("--gpu-tokens", type=int, nargs="+", default=DEFAULT_POOLS, metavar="N")
    add("--block-size", type=int, default=32, help="tokens of a block")
    add("--prefill-rate", type=float, default=15_000.0, help="tokens per second")
    add("--decode-step-ms", type=float, default=20.0)
    add("--tool-ttl", type=float, default=60.0, help="seconds; 0 asks for no retention")
    add(
        "--wait-ttl",
        type=float,
        default=0.0,
        help="seconds a lead's context is retained while it waits for a sub-agent",
    )
    add("--no-evict", action="store_true", help="no evict when an agent ends")
    add(
        "--name-side-calls",
        action="store_true",
        help="one-off calls carry the session's id too",
    )
    add(
        "--jitter",
        type=int,
        default=0,
        metavar="RUNS",
        help="further runs with each task's start moved by up to 30 s",
    )
    return parser


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _table(result: dict[str, object]) -> str:
    arms = result["arms"]
    assert isinstance(arms, dict)
    rows = [["", *(title for title, _, _ in COLUMNS)]]
    for name, arm in arms.items():
        rows.append([name, *(form.format(arm[key]) for _, key, form in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    head = f"\npool of {result['gpu_tokens']:,} tokens"
    foot = (
        f"of the way from LRU to Belady: {result['gap_closed']:.0%}; without hints "
        f"{'identical to' if result['no_hints_identical'] else 'DIFFERENT from'} stock"
    )
    if "jittered_gap_closed" in result:
        foot += f"; jittered: {result['jittered_gap_closed']}"
    return "\n".join([head, *lines, foot])


if __name__ == "__main__":
    sys.exit(main())
