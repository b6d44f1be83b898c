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
from benchmarks.trace_replay.jobs import Job, Outcome, run_jobs
from benchmarks.trace_replay.report import draw, table

AGENTS = TRACES_DIR / "coding_agents.jsonl"
AGENT_POOLS = (100_000, 150_000, 250_000)
CONVERSATION_POOLS = (1_000_000, 2_000_000, 4_000_000)
OPEN_LOOP_ARMS = ("lru", "ours_no_hints", "session_ids", "hints", "belady")
DIRECT_ARMS = ("lru", "hints_no_evict", "hints")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        kind = _kind(options.trace)
    except (OSError, ValueError) as error:
        print(f"cannot read {options.trace}: {error}", file=sys.stderr)
        return 2
    started_s = time.monotonic()
    jobs = _jobs(options, kind)
    outcomes = run_jobs(jobs, options.processes)
    pools = {
        gpu_tokens: _merge([o for o in outcomes if _is_of(o, kind, gpu_tokens)])
        for gpu_tokens in _pools(options, kind)
    }
    for gpu_tokens, (figures, arms) in pools.items():
        print(f"\nGPU cache of {gpu_tokens:,} tokens, medians of the draws")
        print(table(arms))
        print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    direct = _direct(outcomes)
    if direct:
        print("\n20 sessions, 5 requests at a time, 10 to 30 thousand tokens")
        print(table(direct["arms"]))
    if options.png is not None:
        title = f"{options.trace.stem}: hit rate"
        draw(options.png, {size: arms for size, (_, arms) in pools.items()}, title)
    if options.json:
        print(json.dumps(_summary(options, kind, outcomes, pools, direct, started_s)))
    return 0


def _kind(trace: Path) -> str:
    with trace.open(encoding="utf-8") as lines:
        first = json.loads(next(lines, "null"))
    if not isinstance(first, dict):
        raise ValueError("not a JSON object a line")
    return "conversation" if "hash_ids" in first else "agents"


def _pools(options: argparse.Namespace, kind: str) -> Sequence[int]:
    default = CONVERSATION_POOLS if kind == "conversation" else AGENT_POOLS
    return options.gpu_tokens or default


def _jobs(options: argparse.Namespace, kind: str) -> list[Job]:
    is_open_loop = kind == "conversation"
    jobs = [
        Job(
            kind=kind,
            trace=options.trace,
            gpu_tokens=gpu_tokens,
            host_ratio=options.host_ratio,
            draw=number,
            block_size=options.block_size,
            tool_ttl_s=options.tool_ttl or None,
            wait_ttl_s=options.wait_ttl,
            arms=OPEN_LOOP_ARMS if is_open_loop else None,
        )
        for gpu_tokens in _pools(options, kind)
        for number in range(1 if is_open_loop else options.draws)
    ]
    if not is_open_loop and not options.no_direct:
        from benchmarks.trace_replay.direct import POOL_TOKENS

        jobs.append(
            Job(
                kind="direct",
                trace=options.trace,
                gpu_tokens=POOL_TOKENS,
                host_ratio=options.host_ratio,
                arms=DIRECT_ARMS,
            )
        )
    return jobs


def _is_of(outcome: Outcome, kind: str, gpu_tokens: int) -> bool:
    return outcome.job.kind == kind and outcome.job.gpu_tokens == gpu_tokens


def _merge(
    outcomes: Sequence[Outcome],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Medians over the draws of one pool."""
    figures = {
        name: statistics.median(o.figures[name] for o in outcomes)
        for name in outcomes[0].figures
    }
    arms = {
        arm: {
            key: statistics.median(o.arms[arm][key] for o in outcomes) for key in first
        }
        for arm, first in outcomes[0].arms.items()
    }
    return figures, arms


def _direct(outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, float]]]:
    found = [o for o in outcomes if o.job.kind == "direct"]
    if not found:
        return {}
    arms = found[0].arms
    lru = arms["lru"]
    ratios = {
        f"{key}_ratio_{name}": arms[name][f"{key}_mean_s"] / lru[f"{key}_mean_s"]
        for key in ("ttft", "tpot")
        for name in DIRECT_ARMS[1:]
    }
    return {"figures": ratios, "arms": arms}


def _summary(
    options: argparse.Namespace,
    kind: str,
    outcomes: Sequence[Outcome],
    pools: dict[int, tuple[dict[str, float], dict[str, dict[str, float]]]],
    direct: dict[str, dict[str, dict[str, float]]],
    started_s: float,
) -> dict[str, object]:
    from vllm import __version__ as vllm_version

    sizes = list(pools)
    middle = sizes[len(sizes) // 2]
    summary = {
        "benchmark": "trace_replay",
        "trace": options.trace.name,
        "requests": outcomes[0].num_requests,
        "input_tokens": outcomes[0].input_tokens,
        "gpu_tokens": middle,
        "host_ratio": options.host_ratio,
        **pools[middle][0],
        "draws": len([o for o in outcomes if _is_of(o, kind, middle)]),
        "block_size": options.block_size if kind == "agents" else 512,
        "tool_ttl_s": options.tool_ttl,
        "wait_ttl_s": options.wait_ttl,
        "vllm": vllm_version,
        **machine(),
        "wall_s": time.monotonic() - started_s,
        "pools": {
            str(size): {"figures": figures, "arms": arms}
            for size, (figures, arms) in pools.items()
        },
        "direct": direct,
    }
    rounded = _rounded(summary)
    assert isinstance(rounded, dict)
    return rounded


def _rounded(value: object) -> object:
    """Figures cut to what means something."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_replay",
        description="Replays a trace on vLLM's KV cache manager and the connector's "
        "scheduler side, in virtual time: stock LRU, ours, and clairvoyant optima.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--trace", type=Path, default=AGENTS, help="JSON lines, of either known form")
    add(
        "--gpu-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="of the GPU's cache; the JSON's figures on top are of the middle one",
    )
    add("--host-ratio", type=float, default=4.0, help="host tier over GPU's cache")
    add("--block-size", type=int, default=32, help="tokens of a block")
    add("--tool-ttl", type=float, default=60.0, help="seconds; 0 asks for no retention")
    add(
        "--wait-ttl",
        type=float,
        default=0.0,
        help="seconds a context is retained while its agent waits for others",
    )
    add(
        "--draws",
        type=int,
        default=3,
        help="runs: as recorded, and with each task's start moved by up to 30 s",
    )
    add("--no-direct", action="store_true", help="without the RFC's direct test")
    add("--png", type=Path, help="draws hit rate against cache size there")
    add("--processes", type=int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
