"""Measured on a real server: what a key costs in memory and what refreshing costs."""

from __future__ import annotations

import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from benchmarks.scaling.fleet import GB, Fleet, Measured
from benchmarks.store_bandwidth import servers
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.manifest import Manifest, ManifestContext, encode
from sam_connector.pooling.tracker import SessionKeyTracker
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, Outcome, StoreBackend
from sam_connector.storage.registry import StoreOptions, open_store

_BATCH = 1_000
_TTL_S = 3_600.0
_TIMEOUT_S = 60.0
_NUM_LARGE = 32
_NUM_CALLED = 20_000


def measure(binary: str, fleet: Fleet, num_keys: int, rounds: int) -> Measured:
    """The figures of one server, alone and as a cluster of one node.

    One node is what a cluster costs a client at the least: with more of them every
    batch is more, smaller, messages.
    """
    keys = [store_key(index) for index in range(num_keys)]
    with servers.running(binary) as port:
        admin = redis.Redis(port=port)
        key_bytes = _key_bytes(admin, keys)
        few = keys[:_NUM_CALLED]
        script = _calls(f"redis://127.0.0.1:{port}", admin, few, rounds, _touch)
        value_bytes = _value_bytes(admin, keys[0], fleet.value_bytes)
        admin.close()
    with _cluster_of_one(binary) as port:
        admin = redis.Redis(port=port)
        url = f"redis+cluster://127.0.0.1:{port}"
        _fill(admin, few)
        touch = _calls(url, admin, few, rounds, _touch)
        exists = _calls(url, admin, few, rounds, _exists)
        admin.flushall()
        set_rate, get_rate = _bulk(url, admin, keys, fleet.value_bytes, rounds)
        admin.close()
    return Measured(
        key_bytes=key_bytes,
        value_memory_bytes=value_bytes,
        touch_server_us=touch.server_us,
        touch_client_us=touch.client_us,
        touch_wire_bytes=touch.wire_bytes,
        exists_client_us=exists.client_us,
        script_server_us=script.server_us,
        script_client_us=script.client_us,
        script_wire_bytes=script.wire_bytes,
        cluster_set_gb_s=set_rate,
        cluster_get_gb_s=get_rate,
        manifest_bytes=manifest_bytes(fleet),
        tracker_bytes=tracker_bytes(),
    )


def store_key(index: int) -> StoreKey:
    """A name like those of the connector."""
    return StoreKey("", "ab" * 16, GroupId(0), 0, _hash(index))


def manifest_bytes(fleet: Fleet) -> int:
    """A session's manifest, with one context."""
    hashes = [_hash(index) for index in range(fleet.num_blocks)]
    manifest = Manifest(
        session=SessionKey("", "session"),
        contexts=[ManifestContext({GroupId(0): hashes})],
        block_sizes={GroupId(0): fleet.block_tokens},
    )
    return len(encode(manifest))


def tracker_bytes(num_chunks: int = 200_000, per_session: int = 4_096) -> float:
    """Memory of an instance for each chunk it tracks, with the chunk's own hash."""
    tracemalloc.start()
    try:
        tracker = SessionKeyTracker()
        for start in range(0, num_chunks, per_session):
            tracker.add(
                SessionKey("", str(start)),
                [(GroupId(0), _hash(i)) for i in range(start, start + per_session)],
            )
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return used / tracker.num_chunks


class _Cost(NamedTuple):
    """Of one key in a call.

    Attributes:
        server_us: the server's CPU time, as it says itself.
        client_us: this process's.
        wire_bytes: that the server has received and sent.
    """

    server_us: float
    client_us: float
    wire_bytes: float


_Call = Callable[[StoreBackend, Sequence[StoreKey]], BatchResult]


def _touch(store: StoreBackend, keys: Sequence[StoreKey]) -> BatchResult:
    return store.touch(keys, ttl_s=_TTL_S, deadline=time.monotonic() + _TIMEOUT_S)


def _exists(store: StoreBackend, keys: Sequence[StoreKey]) -> BatchResult:
    return store.exists(keys, deadline=time.monotonic() + _TIMEOUT_S)


def _calls(
    url: str, admin: Any, keys: Sequence[StoreKey], rounds: int, call: _Call
) -> _Cost:
    """What ``call`` costs per key, in batches as the pooling manager makes them."""
    store = open_store(url, StoreOptions()).blocks
    _checked(call(store, keys[:_BATCH]))  # connects, and loads the script
    costs = []
    for _ in range(rounds):
        server_s, num_bytes = _server_use(admin)
        client_s = time.process_time()
        for start in range(0, len(keys), _BATCH):
            _checked(call(store, keys[start : start + _BATCH]))
        client_s = time.process_time() - client_s
        server_after_s, bytes_after = _server_use(admin)
        costs.append(
            (
                (server_after_s - server_s) * 1e6,
                client_s * 1e6,
                float(bytes_after - num_bytes),
            )
        )
    store.close()
    columns = zip(*costs, strict=True)
    return _Cost(*(statistics.median(column) / len(keys) for column in columns))


def _bulk(
    url: str, admin: Any, keys: Sequence[StoreKey], size: int, rounds: int
) -> tuple[float, float]:
    """GB/s of one thread that writes and reads large values."""
    store = open_store(url, StoreOptions()).blocks
    value, target = memoryview(bytes(size)), memoryview(bytearray(size))
    put = [Entry(key, [value]) for key in keys[:_NUM_LARGE]]
    get = [Entry(key, [target]) for key in keys[:_NUM_LARGE]]
    set_s, get_s = [], []
    for _ in range(rounds):
        admin.flushall()
        begin = time.monotonic()
        _checked(store.put(put, ttl_s=_TTL_S, deadline=begin + _TIMEOUT_S))
        middle = time.monotonic()
        _checked(store.get(get, deadline=middle + _TIMEOUT_S))
        get_s.append(time.monotonic() - middle)
        set_s.append(middle - begin)
    store.close()
    gigabytes = size * len(put) / GB
    return gigabytes / statistics.median(set_s), gigabytes / statistics.median(get_s)


def _checked(result: BatchResult) -> None:
    if any(outcome is not Outcome.DONE for outcome in result.outcomes):
        raise RuntimeError(f"not everything was done: {result.error}")


def _server_use(admin: Any) -> tuple[float, int]:
    cpu, stats = admin.info("cpu"), admin.info("stats")
    return (
        float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
        stats["total_net_input_bytes"] + stats["total_net_output_bytes"],
    )


def _key_bytes(admin: Any, keys: Sequence[StoreKey]) -> float:
    """Memory per key with a life and a value of no length to speak of."""
    before = admin.info("memory")["used_memory"]
    _fill(admin, keys)
    used: int = admin.info("memory")["used_memory"] - before
    return used / len(keys)


def _value_bytes(admin: Any, key: StoreKey, size: int) -> float:
    """What a server counts for a value of ``size``, more than for a tiny one."""
    counted = []
    for length in (1, size):
        admin.set(str(key), bytes(length), px=int(_TTL_S * 1_000))
        counted.append(admin.memory_usage(str(key)))
    return float(counted[1] - counted[0])


def _fill(admin: Any, keys: Sequence[StoreKey]) -> None:
    for start in range(0, len(keys), _BATCH):
        pipeline = admin.pipeline(transaction=False)
        for key in keys[start : start + _BATCH]:
            pipeline.set(str(key), b"x", px=int(_TTL_S * 1_000))
        pipeline.execute()


@contextmanager
def _cluster_of_one(binary: str) -> Iterator[int]:
    with (
        tempfile.TemporaryDirectory(prefix="scaling-") as folder,
        servers.running(binary, "--dir", folder, "--cluster-enabled", "yes") as port,
    ):
        with redis.Redis(port=port) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
            deadline = time.monotonic() + _TIMEOUT_S
            while not _is_up(admin):
                if time.monotonic() > deadline:
                    raise RuntimeError("the cluster did not start")
                time.sleep(0.05)
        yield port


def _is_up(admin: Any) -> bool:
    try:
        admin.exists("any")
    except redis.RedisError:
        return False
    return True


def _hash(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(32, "big"))
