from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from benchmarks.trace_replay.belady import (
    BeladyPolicy,
    KeyedFreeQueue,
    NextUse,
    SortKey,
)
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import Replay
from benchmarks.trace_replay.server import VirtualServer
from benchmarks.trace_replay.workload import Workload
from tests.benchmarks.trace_replay.rows import ring, row, workload

pytestmark = pytest.mark.vllm


class ByTable(KeyedFreeQueue):
    def __init__(self, blocks: list[KVCacheBlock], keys: dict[int, float]) -> None:
        self.keys = keys
        super().__init__(blocks)

    def key(self, block: KVCacheBlock) -> SortKey:
        return (self.keys[block.block_id],)


def ids(queue: KeyedFreeQueue) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


def test_queue_agrees_with_a_sorted_list() -> None:
    rng = random.Random(0)
    blocks = [KVCacheBlock(i) for i in range(20)]
    keys = dict.fromkeys(range(20), 0.0)
    queue = ByTable([], keys)
    free: set[int] = set()
    for _ in range(2_000):
        block = blocks[rng.randrange(20)]
        if block.block_id not in free:
            keys[block.block_id] = rng.random()
            queue.append(block)
            free.add(block.block_id)
        elif rng.random() < 0.4:
            keys[block.block_id] = rng.random()
            queue.rekey(block)
        elif rng.random() < 0.5:
            queue.remove(block)
            free.remove(block.block_id)
        else:
            popped = queue.popleft()
            assert popped.block_id == min(free, key=lambda i: keys[i])
            free.remove(popped.block_id)
        assert queue.num_free_blocks == len(free)
        assert ids(queue) == sorted(free, key=lambda i: keys[i])


def test_worthless_blocks_come_first() -> None:
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = ByTable([], {0: -5.0, 1: 1.0, 2: 0.0})
    queue.append_n(blocks[:2])
    queue.prepend_n(blocks[2:])
    assert ids(queue) == [2, 0, 1]
    assert [b.block_id for b in queue.iter_blocks_after(blocks[2])] == [0, 1]
    assert [b.block_id for b in queue.popleft_n(3)] == [2, 0, 1]


def test_misuse_is_refused() -> None:
    queue = ByTable([], {0: 0.0})
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()
    with pytest.raises(RuntimeError, match="invalid block"):
        queue.remove(KVCacheBlock(0))


def test_next_use_moves_on_as_requests_are_admitted() -> None:
    load = workload(row("a", 0, 1, 100), row("a", 2, 3, 200))
    next_use = NextUse(load, [10.0, 20.0])
    shared, later = (load.turns[1].context.block_hashes[i] for i in (0, 8))
    assert (next_use.at(shared), next_use.at(later)) == (10.0, 20.0)
    next_use.admitted(0)
    assert next_use.at(shared) == 20.0
    next_use.admitted(1)
    assert next_use.at(shared) == math.inf
    assert next_use.at(b"unknown") == math.inf


def run(load: Workload, policy: Policy, pool_tokens: int) -> Replay:
    return VirtualServer(load, pool_tokens=pool_tokens, policy=policy).run()


def test_it_keeps_what_lru_throws_away() -> None:
    load = ring(4, 5, first_tokens=800)
    lru = run(load, Policy(), 3_600)
    belady = run(load, BeladyPolicy([s.arrival_s for s in lru.served]), 3_600)
    hits = [sum(s.cached_tokens for s in r.served) for r in (lru, belady)]
    assert hits[1] > hits[0]


def test_it_is_lru_where_everything_fits() -> None:
    load = ring(4, 5, first_tokens=800)
    lru = run(load, Policy(), 16_000)
    belady = run(load, BeladyPolicy([s.arrival_s for s in lru.served]), 16_000)
    assert belady.served == lru.served
