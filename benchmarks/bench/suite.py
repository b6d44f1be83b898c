"""The runs of the suite, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import TRACES_DIR

#: By name: module and arguments. Together under 15 minutes on two cores.
RUNS: Mapping[str, tuple[str, ...]] = {
    "core_ops": ("benchmarks.core_ops",),
    "agents": ("benchmarks.trace_replay", "--draws", "2"),
    "conversation": (
        "benchmarks.trace_replay",
        "--trace",
        str(TRACES_DIR / "conversation.jsonl"),
    ),
    "no_hint_overhead": ("benchmarks.no_hint_overhead",),
    "transfer": ("benchmarks.transfer_bandwidth", "--device", "cpu"),
    "agent_serving": ("benchmarks.agent_serving",),
}


class BenchmarkFailed(RuntimeError):
    """A run ended with an error, or without a JSON object as its last line."""


def run(name: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs one benchmark; its tables go to our output, its JSON is returned.

    Raises:
        BenchmarkFailed: with the end of what it printed.
    """
    module, *args = RUNS[name]
    done = subprocess.run(
        [sys.executable, "-m", module, "--json", *args, *more],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    *lines, last = done.stdout.splitlines() or [""]
    print("\n".join(lines), flush=True)
    try:
        result = json.loads(last)
    except ValueError:
        result = None
    if done.returncode or not isinstance(result, dict):
        raise BenchmarkFailed(
            f"{name} ended with {done.returncode}: {last}\n{done.stderr[-2_000:]}"
        )
    return result
