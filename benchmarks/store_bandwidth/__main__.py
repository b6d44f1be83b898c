"""``python -m benchmarks.store_bandwidth``: see ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.common import machine
from benchmarks.store_bandwidth import servers
from benchmarks.store_bandwidth.clients import Client, Limit, Ours, compiled, installed
from benchmarks.store_bandwidth.whole_path import WholePath
from benchmarks.store_bandwidth.workload import Workload

MIB = 1 << 20
SIZES = (64 << 10, 512 << 10, 2 * MIB)
CONNECTIONS = (1, 2)
#: The size that the aims are about.
LARGE = 2 * MIB
AIMS = {
    "get_vs_limit": 0.9,
    "set_vs_limit": 0.85,
    "get_vs_best_library": 1.4,
    "set_vs_best_library": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One server, size and number of connections; GB/s by client."""

    server: str
    size: int
    num_connections: int
    set_rates: dict[str, float]
    get_rates: dict[str, float]
    redis_benchmark: dict[str, float] | None

    def ratios(self) -> dict[str, float]:
        """Ours against the limit, and against the best of the libraries."""
        found = {}
        for name, rates in (("get", self.get_rates), ("set", self.set_rates)):
            libraries = [r for c, r in rates.items() if c not in ("ours", "limit")]
            found[f"{name}_vs_limit"] = rates["ours"] / rates["limit"]
            if libraries:
                found[f"{name}_vs_best_library"] = rates["ours"] / max(libraries)
        return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_bandwidth", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    parser.add_argument("--rounds", type=int, default=7, help="of every client in turn")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    options = parser.parse_args(argv)
    num_rounds = 3 if options.quick else options.rounds
    num_bytes = (32 if options.quick else 128) * MIB
    libraries, versions = installed()
    start = time.monotonic()
    rows: list[Row] = []
    paths = {}
    with compiled() as folder:
        workloads = [
            Workload.make(Path(folder), size, min(num_bytes, 1024 * size))
            for size in SIZES
        ]
        for server, binary in servers.binaries().items():
            versions[f"{server}-server"] = servers.version(binary)
            for workload in workloads:
                for count in CONNECTIONS:
                    with servers.running(binary) as port:
                        row = _measure(
                            server, port, workload, count, libraries, num_rounds
                        )
                    rows.append(row)
                    _print(row)
            with servers.running(binary) as port:
                path = WholePath(f"redis://127.0.0.1:{port}")
                paths[server] = path.measure(num_rounds)
                path.close()
            print(f"{server}: whole path {paths[server]}", file=sys.stderr, flush=True)
    if options.json:
        result = summary(rows) | {
            "whole_path_gb_s": paths,
            "rows": [_as_json(row) for row in rows],
            "versions": versions,
            "machine": machine(),
            "seconds": round(time.monotonic() - start, 1),
        }
        print(json.dumps(result))
    return 0


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """Medians over servers and numbers of connections at the large size, and least."""
    large = [row.ratios() for row in rows if row.size == LARGE]
    result: dict[str, object] = {}
    for name in AIMS:
        values = [ratios[name] for ratios in large if name in ratios]
        if values:
            result[name] = round(statistics.median(values), 3)
            result[f"{name}_least"] = round(min(values), 3)
    result["aims"] = AIMS
    return result


def _measure(
    server: str,
    port: int,
    workload: Workload,
    num_connections: int,
    libraries: Sequence[type[Client]],
    num_rounds: int,
) -> Row:
    clients: list[Client] = [
        Limit(port, num_connections),
        Ours(port, num_connections),
        *(kind(port, num_connections) for kind in libraries),  # type: ignore[call-arg]
    ]
    set_s: dict[str, list[float]] = {client.name: [] for client in clients}
    get_s: dict[str, list[float]] = {client.name: [] for client in clients}
    keys = [str(key) for key in workload.keys]
    admin = redis.Redis(port=port)
    for client in clients:  # the server's memory is touched, connections are made
        admin.delete(*keys)
        client.set(workload)
        client.get(workload)
    for turn in range(num_rounds):
        order = clients[turn % len(clients) :] + clients[: turn % len(clients)]
        for client in order:
            # Ours leaves what is there as it is; so everybody writes what is not.
            admin.delete(*keys)
            set_s[client.name].append(client.set(workload))
            workload.clear()
            get_s[client.name].append(client.get(workload))
            if not isinstance(client, Limit):  # which checks its own memory
                workload.check(client.name)
    for client in clients:
        client.close()
    admin.close()
    return Row(
        server=server,
        size=workload.size,
        num_connections=num_connections,
        set_rates={n: _rate(workload, times) for n, times in set_s.items()},
        get_rates={n: _rate(workload, times) for n, times in get_s.items()},
        redis_benchmark=servers.benchmark(port, workload.size, num_connections),
    )


def _rate(workload: Workload, times: Sequence[float]) -> float:
    return workload.num_bytes / statistics.median(times) / 1e9


def _as_json(row: Row) -> dict[str, object]:
    return {
        "server": row.server,
        "size": row.size,
        "connections": row.num_connections,
        "set_gb_s": {name: round(rate, 3) for name, rate in row.set_rates.items()},
        "get_gb_s": {name: round(rate, 3) for name, rate in row.get_rates.items()},
        "redis_benchmark_gb_s": row.redis_benchmark,
        **{name: round(value, 3) for name, value in row.ratios().items()},
    }


def _print(row: Row) -> None:
    for name, rates in (("SET", row.set_rates), ("GET", row.get_rates)):
        text = "  ".join(f"{client} {rate:.2f}" for client, rate in rates.items())
        print(
            f"{row.server:7} {row.size >> 10:5} KiB x{row.num_connections} {name}: "
            f"{text} GB/s",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
