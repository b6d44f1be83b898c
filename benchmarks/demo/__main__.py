"""``python -m benchmarks.demo``: stock vLLM and ours under the same real agents.

Three servers, equal but for the flags that say what each is: ``stock``; ``tier``,
ours as a plain cache in host memory that is told nothing and saves everything;
``hints``, ours with the same host memory and what an agents' harness knows. The last
line of output is one JSON object: the first pool's numbers, the comparison of tokens,
every pool's numbers. ``benchmarks/README.md`` says how to read them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import RESULTS_DIR, machine
from benchmarks.demo.client import DemoClient
from benchmarks.demo.comparison import PoolComparison
from benchmarks.demo.harness import num_failed
from benchmarks.demo.identity import IdentityRecord, identical
from benchmarks.demo.measures import reusable_tokens
from benchmarks.demo.model import ensure_model
from benchmarks.demo.pool_run import DEMO_ARMS, PoolRecord, PoolRun
from benchmarks.demo.report import draw, table
from benchmarks.demo.server import (
    BLOCK_SIZE,
    HOST_BYTES,
    ServerKind,
    demo_workload,
    make_server,
    pool_blocks,
    running,
)
from benchmarks.demo.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool size.

    Attributes:
        fraction: of the peak live context.
        replay_s: about how long one replay takes on two cores.
    """

    label: str
    fraction: float
    replay_s: float


POOLS = {
    "one_third": Pool(label="1/3", fraction=1 / 3, replay_s=50),
    "two_thirds": Pool(label="2/3", fraction=2 / 3, replay_s=28),
}
#: About how long three servers take to start side by side on two cores, and how long
#: the comparison of tokens takes.
_START_S = 60.0
_IDENTITY_S = 60.0
_ONLY_IN_POOLS = frozenset({"control_calls", "sam_stats", "sam_stats_tier"})


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    begin = time.monotonic()
    chosen = options.pool or list(POOLS)
    expected = expected_s(chosen, options.repeats, identity=not options.no_identity)
    _say(f"this takes about {expected / 60:.0f} minutes on two cores")
    _say("building the small model (once)")
    model = ensure_model()
    workload = demo_workload()
    _say(
        f"{len(workload.turns)} requests, "
        f"{sum(turn.num_prompt_tokens for turn in workload.turns):,} prompt tokens, "
        f"peak live context {workload.peak_live_tokens:,} tokens"
    )
    pools: dict[str, PoolComparison] = {}
    identity: dict[ServerKind, IdentityRecord] = {}
    for key in chosen:
        # Tokens are compared once, where the pressure is highest.
        compare = key == chosen[0] and not options.no_identity
        num_blocks = pool_blocks(workload, POOLS[key].fraction)
        record = _run(model, workload, POOLS[key], options.repeats, identity=compare)
        pools[key] = record.comparison(
            workload, label=POOLS[key].label, num_blocks=num_blocks
        )
        identity |= record.identity
        _write_turns(RESULTS_DIR / f"demo-turns-{key}.jsonl", workload, record)
    compared = identical(identity.values())
    picture = RESULTS_DIR / "demo.png"
    draw(pools, picture)
    print(f"\n{table(pools)}\n")
    print(f"tokens identical in {sum(compared)} of {len(compared)} requests")
    for kind, tokens in identity.items():
        print(
            f"  {kind}: {tokens.cached_tokens:,} of {tokens.prompt_tokens:,} prompt "
            f"tokens from cache, {tokens.loaded_bytes:,} bytes from host memory"
        )
    for pool in pools.values():
        failed, calls = num_failed(pool.control_calls), pool.control_calls.total()
        print(f"control calls {pool.label}: {calls}, without effect: {failed}")
    print(f"picture: {picture}")
    total_s = time.monotonic() - begin
    print(json.dumps(summary(pools, identity, options.repeats, total_s)))
    return 0 if all(compared) else 1


def expected_s(pools: Sequence[str], num_repeats: int, *, identity: bool) -> float:
    """About how long a run takes on two cores, once everything is installed."""
    replays = sum(POOLS[key].replay_s for key in pools)
    total = _START_S * len(pools) + replays * num_repeats * len(DEMO_ARMS)
    return total + _IDENTITY_S * identity


def summary(
    pools: Mapping[str, PoolComparison],
    identity: Mapping[ServerKind, IdentityRecord],
    num_repeats: int,
    total_s: float,
) -> dict[str, object]:
    """The first pool's numbers, the comparison of tokens, then every pool."""
    first = next(iter(pools.values())).as_json()
    compared = identical(identity.values())
    return {
        **{key: value for key, value in first.items() if key not in _ONLY_IN_POOLS},
        "tokens_identical": bool(compared) and all(compared),
        "tokens_compared_requests": len(compared),
        **{
            f"identity_{name}_{kind}": getattr(record, name)
            for kind, record in identity.items()
            for name in ("cached_tokens", "loaded_bytes")
        },
        "pools": {key: pool.as_json() for key, pool in pools.items()},
        "host_bytes": HOST_BYTES,
        "repeats": num_repeats,
        "total_s": round(total_s, 1),
        **machine(),
    }


def _run(
    model: Path, workload: Workload, pool: Pool, num_repeats: int, *, identity: bool
) -> PoolRecord:
    num_blocks = pool_blocks(workload, pool.fraction)
    _say(f"pool {pool.label}: {num_blocks} blocks; starting the servers")
    servers = {
        kind: make_server(model, workload, num_blocks, kind=kind) for kind in DEMO_ARMS
    }
    with running(servers.values()):
        run = PoolRun(
            workload,
            DEMO_ARMS,
            lambda kind: DemoClient(servers[kind].url),
            lambda line: _say(f"{pool.label} {line}"),
        )
        return asyncio.run(run.run(num_repeats=num_repeats, identity=identity))


def _write_turns(path: Path, workload: Workload, record: PoolRecord) -> None:
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
            for kind, replays in record.replays.items():
                row[kind] = [asdict(replay.results[turn.index]) for replay in replays]
            out.write(json.dumps(row) + "\n")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pool", action="append", choices=list(POOLS), help="only this pool size"
    )
    parser.add_argument(
        "--repeats",
        type=_at_least_one,
        default=3,
        metavar="N",
        help="passes over each server; numbers are medians (default: %(default)s)",
    )
    parser.add_argument(
        "--no-identity", action="store_true", help="do not compare tokens"
    )
    return parser.parse_args(argv)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a number from 1")
    return int(text)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
