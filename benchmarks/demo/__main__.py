"""``python -m benchmarks.demo``: stock vLLM and ours under the same real agents."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.common import RESULTS_DIR, VllmServer, machine
from benchmarks.demo.client import DemoClient
from benchmarks.demo.identity import generate_one_by_one
from benchmarks.demo.measures import Measures, measure
from benchmarks.demo.model import DEMO_MODEL, ensure_model
from benchmarks.demo.replay import Replay
from benchmarks.demo.report import PoolComparison, draw, table
from benchmarks.demo.server import BLOCK_SIZE, make_server, pool_blocks
from benchmarks.demo.workload import Workload, build_workload, load_trace

POOLS = {"one_third": ("1/3", 1 / 3), "two_thirds": ("2/3", 2 / 3)}
#: The pool the top-level numbers and the token comparison belong to.
MAIN_POOL = "one_third"
#: In these turns children end, others start, and leads wait for both.
IDENTITY_TURNS = slice(62, 108)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    measures: Measures
    tokens: dict[int, list[int]]


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    begin = time.monotonic()
    _say("building the small model (once)")
    model = ensure_model()
    workload = build_workload(
        load_trace(),
        num_rows=options.rows,
        token_divisor=16,
        gap_divisor=10.0,
        vocab_size=DEMO_MODEL.vocab_size,
    )
    _say(
        f"{len(workload.turns)} requests, "
        f"{sum(turn.num_prompt_tokens for turn in workload.turns):,} prompt tokens, "
        f"peak live context {workload.peak_live_tokens:,} tokens"
    )
    pools: dict[str, PoolComparison] = {}
    compared: list[bool] = []
    for key, (label, fraction) in POOLS.items():
        num_blocks = pool_blocks(workload, fraction)
        _say(f"pool {label}: {num_blocks} blocks; starting both servers")
        with ExitStack() as stack:
            servers = [
                make_server(model, workload, num_blocks, hints=hints)
                for hints in (False, True)
            ]
            for server in servers:
                stack.callback(server.stop)
                server.launch()
            outcomes = []
            for server in servers:
                server.wait_healthy()
            for hints, server in zip((False, True), servers, strict=True):
                outcomes.append(
                    asyncio.run(_drive(server, workload, key, label, hints=hints))
                )
                server.stop()
        stock, ours = outcomes
        compared += [stock.tokens[i] == ours.tokens[i] for i in stock.tokens]
        pools[key] = PoolComparison(
            label=label,
            num_blocks=num_blocks,
            stock=stock.measures,
            hints=ours.measures,
        )
    picture = RESULTS_DIR / "demo.png"
    draw(pools, picture)
    print(f"\n{table(pools)}\n")
    print(f"tokens identical in {sum(compared)} of {len(compared)} requests")
    print(f"picture: {picture}")
    print(json.dumps(_summary(pools, compared, time.monotonic() - begin)))
    return 0 if all(compared) else 1


async def _drive(
    server: VllmServer, workload: Workload, key: str, label: str, *, hints: bool
) -> Outcome:
    name = f"{'hints' if hints else 'stock'} {label}"
    async with DemoClient(server.url) as client:
        await _warm_up(client)

        def report(line: str) -> None:
            _say(f"{name}: {line}")

        replay = Replay(client, workload, hints=hints, report=report)
        record = await replay.run()
        report(f"done in {record.duration_s:.1f} s")
        tokens: dict[int, list[int]] = {}
        if key == MAIN_POOL:
            tokens = await generate_one_by_one(
                client,
                workload,
                workload.turns[IDENTITY_TURNS],
                hints=hints,
                report=report,
            )
    return Outcome(measures=measure(record, workload, BLOCK_SIZE), tokens=tokens)


async def _warm_up(client: DemoClient) -> None:
    """A server's first requests pay for lazy set-up; keep that out of the numbers."""
    for length in (40, 400):
        await client.generate([7] * length, 2, None)


def _summary(
    pools: dict[str, PoolComparison], compared: list[bool], duration_s: float
) -> dict[str, object]:
    return {
        **pools[MAIN_POOL].as_json(),
        "tokens_identical": bool(compared) and all(compared),
        "tokens_compared_requests": len(compared),
        "pools": {key: pool.as_json() for key, pool in pools.items()},
        "total_s": round(duration_s, 1),
        **machine(),
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.demo", description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=200, help="rows of the trace to replay"
    )
    return parser.parse_args(argv)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
