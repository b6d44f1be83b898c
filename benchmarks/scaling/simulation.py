"""Simulated: how evenly refreshes come, and how evenly shards are read."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from redis.crc import key_slot

from benchmarks.scaling.fleet import Fleet
from benchmarks.scaling.measures import store_key
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.keep_alive import KeepAlive
from sam_connector.pooling.tracker import SessionKeyTracker

_NUM_SLOTS = 16_384

#: As the pooling manager has them.
_TICK_S = 0.25
_BATCHES_PER_TICK = 16

_ROUNDS = 6


def refreshes(num_sessions: int, chunks: int, interval_s: float) -> list[int]:
    """How many values one instance refreshes in each tick, once it is under way."""
    max_batch = PoolingConfig().max_batch
    tracker = SessionKeyTracker()
    keep_alive = KeepAlive(tracker, interval_s=interval_s)
    for index in range(num_sessions):
        session = SessionKey("", str(index))
        first = index * chunks
        tracker.add(session, [_chunk(i) for i in range(first, first + chunks)])
        keep_alive.set_lease(session, 1e9)
    per_tick = []
    ticks_per_round = round(interval_s / _TICK_S)
    for tick in range(_ROUNDS * ticks_per_round):
        num_refreshed = 0
        for _ in range(_BATCHES_PER_TICK):
            due = len(keep_alive.due(tick * _TICK_S, max_batch))
            num_refreshed += due
            if due < max_batch:
                break
        per_tick.append(num_refreshed)
    return per_tick[ticks_per_round:-ticks_per_round]  # whole rounds


def spread(fleet: Fleet, seed: int = 1) -> dict[str, float]:
    """Peak to mean of refreshes per second: of one instance, and of all together.

    Instances start at any time, so all together are one shifted against itself.
    """
    sessions = max(1, fleet.num_stored // fleet.num_instances)
    begin = time.perf_counter()
    per_tick = refreshes(sessions, fleet.num_blocks, fleet.keep_alive_s)
    took = time.perf_counter() - begin
    rng, size = random.Random(seed), len(per_tick)
    together = [0] * size
    for _ in range(fleet.num_instances):
        shift = rng.randrange(size)
        for tick in range(size):
            together[tick] += per_tick[tick - shift]
    due = sessions * fleet.num_blocks
    rounds = size * _TICK_S / fleet.keep_alive_s
    return {
        "peak_to_mean_of_an_instance": peak_to_mean(_per_second(per_tick)),
        "peak_to_mean_of_all": peak_to_mean(_per_second(together)),
        "refreshed_per_round_share": sum(per_tick) / rounds / due,
        "planning_us_per_chunk": took * 1e6 / (due * _ROUNDS),
    }


def hot_shards(fleet: Fleet, num_shards: int, num_prefixes: int) -> dict[str, float]:
    """Peak to mean of what shards are read for shared prefixes, by our names.

    Every value of a prefix is read as often as the prefix is; prefixes differ as
    Zipf says: the second is read half as often as the first, the third a third.
    """
    blocks = fleet.shared_tokens // fleet.block_tokens
    shards = [
        shards_of(range(n * blocks, (n + 1) * blocks), num_shards)
        for n in range(num_prefixes)
    ]
    by_zipf = [0.0] * num_shards
    for rank, counts in enumerate(shards, start=1):
        for shard, count in enumerate(counts):
            by_zipf[shard] += count / rank
    return {
        "one_prefix_for_all": statistics.median(map(peak_to_mean, shards)),
        "prefixes_by_zipf": peak_to_mean(by_zipf),
        "busiest_share_of_one_prefix": statistics.median(
            max(counts) / blocks for counts in shards
        ),
    }


def shards_of(indices: Sequence[int], num_shards: int) -> list[int]:
    """How many of these values each shard of a cluster has."""
    counts = [0] * num_shards
    for index in indices:
        slot = key_slot(str(store_key(index)).encode())
        counts[slot * num_shards // _NUM_SLOTS] += 1
    return counts


def peak_to_mean(loads: Sequence[float]) -> float:
    return max(loads) / statistics.mean(loads)


def _per_second(per_tick: Sequence[int]) -> list[int]:
    size = round(1 / _TICK_S)
    return [sum(per_tick[n : n + size]) for n in range(0, len(per_tick), size)]


def _chunk(index: int) -> tuple[GroupId, BlockHash]:
    return GroupId(0), BlockHash(index.to_bytes(32, "big"))
