"""``python -m benchmarks.agent_serving``: see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.agent_serving.comparison import ServingComparison, compare
from benchmarks.agent_serving.model import agrees, modelled_ttft
from benchmarks.agent_serving.rates import Rates, measure_rates
from benchmarks.agent_serving.scenario import NUM_ROWS, Scenario, scenario
from benchmarks.agent_serving.wrong_hints import WrongPolicy, wrong_sessions
from benchmarks.common import VllmServer, machine
from benchmarks.demo.client import DemoClient
from benchmarks.demo.model import ensure_model
from benchmarks.demo.pool_run import DEMO_ARMS, Arms, PoolRecord, PoolRun
from benchmarks.demo.report import Row, count, mebibytes, percent, seconds, table
from benchmarks.demo.server import ServerKind, make_server, running

#: With fewer nobody waits for anybody.
MIN_ROWS = 60
ROWS: tuple[Row, ...] = (
    ("TTFT p50 (s)", "ttft_p50_s", seconds),
    ("TTFT p99 (s)", "ttft_p99_s", seconds),
    ("time per further token (s)", "tpot_mean_s", seconds),
    ("time per request (s)", "e2e_mean_s", seconds),
    ("tokens per second", "tokens_per_s", count),
    ("requests per second", "requests_per_s", lambda value: f"{value:.2f}"),
    ("prompt tokens from cache", "cached_rate", percent),
    ("prompt tokens recomputed", "recomputed_tokens", count),
    ("MiB moved", "bytes_moved", mebibytes),
    ("duration (s)", "duration_s", lambda value: f"{value:.1f}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was recorded of all servers."""

    record: PoolRecord
    rates: Rates
    version: str


def arms(seed: int) -> Arms:
    """The demo's three, and one whose agents are partly wrong."""
    return {**DEMO_ARMS, ServerKind.WRONG: functools.partial(WrongPolicy, seed=seed)}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    begin = time.monotonic()
    planned = scenario(options.rows)
    _note("building the small model (once)")
    outcome = _serve(ensure_model(), planned, options.repeats, options.seed)
    workload = planned.workload
    wrong = wrong_sessions(workload.turns, options.seed)
    compared = compare(
        outcome.record,
        workload,
        num_blocks=planned.pool_blocks,
        wrong_sessions=wrong,
    )
    print(f"\n{table({'': compared.pool}, ROWS)}\n")
    print(_ratio_lines(compared))
    modelled = modelled_ttft(planned, outcome.rates)
    print(f"by the model: {', '.join(sorted(modelled, key=modelled.__getitem__))}")
    if options.json:
        summary = {
            "benchmark": "agent_serving",
            **compared.as_json(),
            "workload": planned.as_json(),
            "wrong_session_names": sorted(wrong),
            "rates": asdict(outcome.rates),
            "modelled_ttft_mean_s": modelled,
            "model_agrees": agrees(modelled, compared.mean_ttfts()),
            "repeats": options.repeats,
            "seed": options.seed,
            "vllm": outcome.version,
            **machine(),
            "wall_s": round(time.monotonic() - begin, 1),
        }
        print(json.dumps(summary))
    return 0


def _serve(model: Path, planned: Scenario, num_repeats: int, seed: int) -> Outcome:
    driven = arms(seed)
    servers = {
        kind: make_server(
            model,
            planned.workload,
            planned.pool_blocks + 1,
            kind=kind,
            host_bytes=planned.host_bytes,
        )
        for kind in driven
    }
    _note(f"starting {len(servers)} servers, {planned.pool_blocks} blocks each")
    with running(servers.values()):
        return asyncio.run(drive(servers, planned, driven, num_repeats))


async def drive(
    servers: Mapping[ServerKind, VllmServer],
    planned: Scenario,
    driven: Arms,
    num_repeats: int,
) -> Outcome:
    """All repeats on servers that run; the engine's speed is that of the first."""
    workload = planned.workload
    run = PoolRun(workload, driven, lambda kind: DemoClient(servers[kind].url), _note)
    record = await run.run(num_repeats=num_repeats, identity=False)
    async with DemoClient(servers[next(iter(driven))].url) as client:
        rates = await measure_rates(client, workload.vocab_size)
        return Outcome(record=record, rates=rates, version=await client.version())


def _ratio_lines(compared: ServingComparison) -> str:
    lines = [f"{name}: {value}" for name, value in compared.median_ratios().items()]
    return "\n".join([*lines, f"order by mean TTFT: {', '.join(compared.order())}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent_serving",
        description="Coding agents on four live servers: stock vLLM, ours as a plain "
        "tier, ours with hints, ours with hints that are wrong for one session in "
        "five.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--repeats", type=_at_least(1), default=3, metavar="N")
    add("--rows", type=_at_least(MIN_ROWS), default=NUM_ROWS, help="of the trace")
    add("--seed", type=int, default=0, help="who is wrong, and how")
    return parser


def _at_least(least: int) -> functools.partial[int]:
    return functools.partial(_number, least=least)


def _number(text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a number from {least}")
    return int(text)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
