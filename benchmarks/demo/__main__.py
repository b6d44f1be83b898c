"""``python -m benchmarks.demo``: stock vLLM and ours under the same real agents."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS_DIR, VllmServer, machine
from benchmarks.demo.client import DemoClient
from benchmarks.demo.identity import generate_one_by_one
from benchmarks.demo.measures import Measures, measure, reusable_tokens
from benchmarks.demo.model import ensure_model
from benchmarks.demo.policy import ControlCall
from benchmarks.demo.replay import Replay, RunRecord
from benchmarks.demo.report import PoolComparison, draw, table
from benchmarks.demo.server import (
    BLOCK_SIZE,
    demo_workload,
    make_server,
    pool_blocks,
)
from benchmarks.demo.workload import Workload

POOLS = {"one_third": ("1/3", 1 / 3), "two_thirds": ("2/3", 2 / 3)}
#: In these turns children end, others start, and leads wait for both.
IDENTITY_TURNS = slice(62, 108)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one server did at one pool size; ``tokens`` by turn index."""

    record: RunRecord
    measures: Measures
    tokens: dict[int, list[int]] = field(default_factory=dict)
    sam_stats: dict[str, Any] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    begin = time.monotonic()
    _say("building the small model (once)")
    model = ensure_model()
    workload = demo_workload()
    _say(
        f"{len(workload.turns)} requests, "
        f"{sum(turn.num_prompt_tokens for turn in workload.turns):,} prompt tokens, "
        f"peak live context {workload.peak_live_tokens:,} tokens"
    )
    chosen = options.pool or list(POOLS)
    pools: dict[str, PoolComparison] = {}
    compared: list[bool] = []
    for key in chosen:
        # Tokens are compared once, where the pressure is highest.
        compare = key == chosen[0] and not options.no_identity
        stock, ours = _compare(model, workload, key, compare=compare)
        compared += [stock.tokens[i] == ours.tokens[i] for i in stock.tokens]
        label, fraction = POOLS[key]
        pools[key] = PoolComparison(
            label=label,
            num_blocks=pool_blocks(workload, fraction),
            stock=stock.measures,
            hints=ours.measures,
            sam_stats=ours.sam_stats,
        )
        _write_turns(RESULTS_DIR / f"demo-turns-{key}.jsonl", workload, stock, ours)
    picture = RESULTS_DIR / "demo.png"
    draw(pools, picture)
    print(f"\n{table(pools)}\n")
    print(f"tokens identical in {sum(compared)} of {len(compared)} requests")
    print(f"picture: {picture}")
    print(json.dumps(_summary(pools, compared, time.monotonic() - begin)))
    return 0 if all(compared) else 1


def _compare(
    model: Path, workload: Workload, key: str, *, compare: bool
) -> tuple[Outcome, Outcome]:
    """Both servers at one pool size, one after the other."""
    label, fraction = POOLS[key]
    num_blocks = pool_blocks(workload, fraction)
    _say(f"pool {label}: {num_blocks} blocks; starting both servers")
    with ExitStack() as stack:
        stock, ours = (
            make_server(model, workload, num_blocks, hints=hints)
            for hints in (False, True)
        )
        for server in (stock, ours):
            stack.callback(server.stop)
            server.launch()
        for server in (stock, ours):
            server.wait_healthy()
        first = asyncio.run(
            _drive(stock, workload, f"stock {label}", hints=False, compare=compare)
        )
        stock.stop()
        second = asyncio.run(
            _drive(ours, workload, f"hints {label}", hints=True, compare=compare)
        )
    return first, second


async def _drive(
    server: VllmServer, workload: Workload, name: str, *, hints: bool, compare: bool
) -> Outcome:
    def report(line: str) -> None:
        _say(f"{name}: {line}")

    async with DemoClient(server.url) as client:
        await _warm_up(client)
        record = await Replay(client, workload, hints=hints, report=report).run()
        report(f"done in {record.duration_s:.1f} s")
        stats = await _sam_stats(client) if hints else {}
        tokens = {}
        if compare:
            turns = workload.turns[IDENTITY_TURNS]
            tokens = await generate_one_by_one(
                client, workload, turns, hints=hints, report=report
            )
    return Outcome(
        record=record,
        measures=measure(record, workload, BLOCK_SIZE),
        tokens=tokens,
        sam_stats=stats,
    )


async def _warm_up(client: DemoClient) -> None:
    """A server's first requests pay for lazy set-up; keep that out of the numbers."""
    for length in (40, 400):
        await client.generate([7] * length, 2, None)


async def _sam_stats(client: DemoClient) -> dict[str, Any]:
    stats = await client.control(ControlCall(method="GET", path="/v1/agent/stats"))
    assert isinstance(stats, dict)
    return stats


def _write_turns(path: Path, workload: Workload, stock: Outcome, ours: Outcome) -> None:
    """What each server made of each turn, for whoever wants to know why."""
    with path.open("w", encoding="utf-8") as out:
        for turn in workload.turns:
            prompt = turn.num_prompt_tokens
            row: dict[str, object] = {
                "turn": turn.index,
                "session": turn.session,
                "next": turn.next.value,
                "prompt_tokens": prompt,
                "reusable_tokens": reusable_tokens(
                    turn.seen_tokens, prompt, BLOCK_SIZE
                ),
            }
            for name, outcome in (("stock", stock), ("hints", ours)):
                row[name] = asdict(outcome.record.results[turn.index])
            out.write(json.dumps(row) + "\n")


def _summary(
    pools: dict[str, PoolComparison], compared: list[bool], duration_s: float
) -> dict[str, object]:
    """The first pool's numbers, the comparison of tokens, then every pool."""
    first = next(iter(pools.values())).as_json()
    return {
        **{k: v for k, v in first.items() if k != "sam_stats"},
        "tokens_identical": bool(compared) and all(compared),
        "tokens_compared_requests": len(compared),
        "pools": {key: pool.as_json() for key, pool in pools.items()},
        "total_s": round(duration_s, 1),
        **machine(),
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.demo", description=__doc__)
    parser.add_argument(
        "--pool", action="append", choices=list(POOLS), help="only this pool size"
    )
    parser.add_argument(
        "--no-identity", action="store_true", help="do not compare tokens"
    )
    return parser.parse_args(argv)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
