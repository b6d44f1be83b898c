"""``python -m benchmarks.scaling``: what a million sessions cost a store.

On paper and by simulation, from figures that are measured here: what a key costs a
real server in memory, what refreshing one costs it in time, and how large a manifest
is. See ``docs/scaling.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.common import machine
from benchmarks.store_bandwidth import servers
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.keep_alive import KeepAlive
from sam_connector.pooling.manifest import Manifest, ManifestContext, encode
from sam_connector.pooling.tracker import SessionKeyTracker
from sam_connector.storage.key import StoreKey
from sam_connector.storage.registry import StoreOptions, open_store

GB = 10**9
_BATCH = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The deployment on paper.

    Attributes:
        num_sessions: live, all instances together.
        num_instances: engines.
        tokens: per session.
        shared_tokens: of them a prefix that others have too (system prompt, tools).
        num_prefixes: different ones of those.
        bytes_per_token: of KV cache; 128 KiB is an 8B model with grouped queries.
        block_tokens: per block.
        share_stored: of the sessions, how many are in the store at a time: those that
            wait for long, not those that are being served.
        ttl_s: life of a value.
        keep_alive_s: between two refreshes.
        shard_bytes: memory of one server of the cluster.
    """

    num_sessions: int = 1_000_000
    num_instances: int = 100
    tokens: int = 65_536
    shared_tokens: int = 16_384
    num_prefixes: int = 1_000
    bytes_per_token: int = 128 << 10
    block_tokens: int = 16
    share_stored: float = 1.0
    ttl_s: float = 3_600.0
    keep_alive_s: float = 60.0
    shard_bytes: int = 256 << 30

    @property
    def value_bytes(self) -> int:
        """One block, on one rank: no grouping and no cutting at these sizes."""
        return self.block_tokens * self.bytes_per_token

    @property
    def num_keys(self) -> int:
        own = (self.tokens - self.shared_tokens) // self.block_tokens
        shared = self.shared_tokens // self.block_tokens
        return int(self.num_sessions * self.share_stored) * own + (
            self.num_prefixes * shared
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the paper needs to know.

    Attributes:
        key_bytes: memory of a key beside its value's bytes.
        touch_s: of a server, for each key that is refreshed.
        touch_wire_bytes: sent for each.
        manifest_bytes: of a session of ``Fleet.tokens``.
        tracker_bytes: memory of an instance for each chunk it tracks.
    """

    key_bytes: float
    touch_s: float
    touch_wire_bytes: float
    manifest_bytes: int
    tracker_bytes: float


def measure(fleet: Fleet, num_keys: int, rounds: int) -> dict[str, Measured]:
    """Figures of every server that is here."""
    manifest = _manifest_bytes(fleet)
    tracker = _tracker_bytes()
    found = {}
    for name, binary in servers.binaries().items():
        with servers.running(binary) as port:
            admin = redis.Redis(port=port)
            keys = [_key(index) for index in range(num_keys)]
            key_bytes = _key_bytes(admin, keys)
            touch_s = _touch_s(port, admin, keys, rounds)
            admin.close()
        found[name] = Measured(
            key_bytes=round(key_bytes, 1),
            touch_s=touch_s,
            touch_wire_bytes=float(
                len(str(keys[0])) + len(f"${len(str(keys[0]))}\r\n\r\n")
            ),
            manifest_bytes=manifest,
            tracker_bytes=round(tracker, 1),
        )
    return found


def on_paper(fleet: Fleet, measured: Measured) -> dict[str, float]:
    """What the fleet costs the cluster; see ``docs/scaling.md``."""
    num_keys = fleet.num_keys
    data = num_keys * fleet.value_bytes
    overhead = num_keys * measured.key_bytes
    manifests = fleet.num_sessions * measured.manifest_bytes
    refreshed_per_s = num_keys / fleet.keep_alive_s
    num_shards = -(-(data + overhead + manifests) // fleet.shard_bytes)
    cores = refreshed_per_s * measured.touch_s
    return {
        "keys_millions": round(num_keys / 1e6, 1),
        "data_tb": round(data / 1e12, 1),
        "key_overhead_tb": round(overhead / 1e12, 3),
        "manifests_tb": round(manifests / 1e12, 3),
        "shards_for_memory": num_shards,
        "refreshed_keys_per_s_millions": round(refreshed_per_s / 1e6, 2),
        "keep_alive_server_cores": round(cores, 2),
        "keep_alive_cpu_share_of_a_shard": round(cores / num_shards, 5),
        "keep_alive_network_gb_s": round(
            refreshed_per_s * measured.touch_wire_bytes / GB, 3
        ),
        "tracker_gb_per_instance": round(
            num_keys / fleet.num_instances * measured.tracker_bytes / GB, 2
        ),
        "tracked_chunks_per_instance_millions": round(
            num_keys / fleet.num_instances / 1e6, 2
        ),
    }


def simulate_spread(num_sessions: int = 10_000, chunks: int = 8) -> dict[str, float]:
    """How evenly one instance's refreshes come, tick by tick, over ten rounds."""
    tracker = SessionKeyTracker()
    keep_alive = KeepAlive(tracker, interval_s=60.0)
    for index in range(num_sessions):
        session = SessionKey("", str(index))
        tracker.add(session, [_chunk(index * chunks + i) for i in range(chunks)])
        keep_alive.set_lease(session, 1e9)
    keep_alive.due(0.0, 1)
    batches, took = [], []
    for tick in range(1, 10 * 240 + 1):
        begin = time.perf_counter()
        batches.append(len(keep_alive.due(tick * 0.25, 100_000)))
        took.append(time.perf_counter() - begin)
    whole = batches[241:-240]  # complete rounds
    return {
        "peak_to_mean": round(max(whole) / statistics.mean(whole), 2),
        "longest_tick_ms": round(max(took) * 1e3, 2),
        "refreshed_per_round_share": round(
            sum(batches) / 10 / (num_sessions * chunks), 3
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at last")
    parser.add_argument("--keys", type=int, default=100_000, help="in the real server")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    fleet = Fleet()
    measured = measure(fleet, options.keys, options.rounds)
    everything = Fleet()
    waiting = Fleet(share_stored=0.01)
    result: dict[str, Any] = {
        "measured": {name: _as_json(each) for name, each in measured.items()},
        "all_sessions_stored": {
            name: on_paper(everything, each) for name, each in measured.items()
        },
        "one_in_a_hundred_stored": {
            name: on_paper(waiting, each) for name, each in measured.items()
        },
        "spread": simulate_spread(),
        "machine": machine(),
    }
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return 0


def _key(index: int) -> StoreKey:
    block_hash = BlockHash(index.to_bytes(8, "big") * 4)
    return StoreKey("", "ab" * 16, GroupId(0), 0, block_hash)


def _chunk(index: int) -> tuple[GroupId, BlockHash]:
    return GroupId(0), BlockHash(index.to_bytes(32, "big"))


def _key_bytes(admin: Any, keys: Sequence[StoreKey]) -> float:
    """Memory per key with a life and a value of no length to speak of."""
    before = admin.info("memory")["used_memory"]
    for start in range(0, len(keys), _BATCH):
        pipeline = admin.pipeline(transaction=False)
        for key in keys[start : start + _BATCH]:
            pipeline.set(str(key), b"x", px=3_600_000)
        pipeline.execute()
    used: int = admin.info("memory")["used_memory"] - before
    return used / len(keys)


def _touch_s(port: int, admin: Any, keys: Sequence[StoreKey], rounds: int) -> float:
    """The server's CPU time for each key of a refresh, as it says itself."""
    store = open_store(f"redis://127.0.0.1:{port}", StoreOptions()).blocks
    taken = []
    for _ in range(rounds):
        before = _cpu_s(admin)
        for start in range(0, len(keys), _BATCH):
            store.touch(
                keys[start : start + _BATCH],
                ttl_s=3_600,
                deadline=time.monotonic() + 30,
            )
        taken.append((_cpu_s(admin) - before) / len(keys))
    store.close()
    return statistics.median(taken)


def _cpu_s(admin: Any) -> float:
    cpu = admin.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def _manifest_bytes(fleet: Fleet) -> int:
    num_blocks = fleet.tokens // fleet.block_tokens
    hashes = [_chunk(index)[1] for index in range(num_blocks)]
    manifest = Manifest(
        session=SessionKey("", "session"),
        contexts=[ManifestContext({GroupId(0): hashes})],
        block_sizes={GroupId(0): fleet.block_tokens},
    )
    return len(encode(manifest))


def _tracker_bytes() -> float:
    import tracemalloc

    num_chunks = 200_000
    chunks = [_chunk(index) for index in range(num_chunks)]
    tracemalloc.start()
    tracker = SessionKeyTracker()
    for start in range(0, num_chunks, 4_096):
        tracker.add(SessionKey("", str(start)), chunks[start : start + 4_096])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The hash itself, which the tracker shares with nobody once blocks are gone.
    per_chunk = sys.getsizeof(chunks[0]) + sys.getsizeof(chunks[0][1])
    return used / num_chunks + per_chunk


def _as_json(measured: Measured) -> dict[str, float]:
    return {
        "key_bytes": measured.key_bytes,
        "touch_us": round(measured.touch_s * 1e6, 3),
        "touch_wire_bytes": measured.touch_wire_bytes,
        "manifest_bytes": measured.manifest_bytes,
        "tracker_bytes": measured.tracker_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
