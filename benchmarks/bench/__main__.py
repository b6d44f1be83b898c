"""``python -m benchmarks.bench`` (``make bench``): see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.aims import judge, table
from benchmarks.bench.suite import RUNS, BenchmarkFailed, run
from benchmarks.common import machine

RESULTS = Path(__file__).parents[1] / "results"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    started_s = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    failed = []
    for name in options.only or RUNS:
        print(f"\n== {name}", flush=True)
        begun_s = time.monotonic()
        try:
            results[name] = run(name)
        except BenchmarkFailed as error:
            failed.append(name)
            print(error, file=sys.stderr)
        print(f"== {name}: {time.monotonic() - begun_s:.0f} s", flush=True)
    verdicts = [v for v in judge(results) if v.aim.run in (options.only or RUNS)]
    text = table(verdicts)
    print(f"\n{text}\n")
    if options.write:
        _write(text, results)
    wall_s = round(time.monotonic() - started_s, 1)
    print(
        json.dumps(
            {
                "benchmark": "bench",
                "aims": len(verdicts),
                "met": sum(verdict.is_met for verdict in verdicts),
                "not_met": [v.aim.what for v in verdicts if not v.is_met],
                "failed": failed,
                "wall_s": wall_s,
                **machine(),
            }
        )
    )
    return 1 if failed else 0


def _write(text: str, results: dict[str, dict[str, Any]]) -> None:
    """Keeps the table, dated, and the JSON of every run."""
    date = time.strftime("%Y-%m-%d")
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    versions = {r["vllm"] for r in results.values() if "vllm" in r}
    head = f"# {date}\n\n`make bench` on {about}, vllm {'/'.join(sorted(versions))}.\n"
    (RESULTS / f"{date}.md").write_text(f"{head}\n{text}\n", encoding="utf-8")
    for name, result in results.items():
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench",
        description="Runs the benchmarks that need no GPU and says which aims are met.",
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(RUNS), metavar="NAME", help="these runs alone"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the results in benchmarks/results"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
