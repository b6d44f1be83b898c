from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from benchmarks.core_ops import queue_ratio
from benchmarks.core_ops.queue_ratio import measure_queues

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 4_500


def test_every_queue_plays_every_pair() -> None:
    costs = measure_queues(NUM_BLOCKS, 3)
    assert min(costs.stock_ns, costs.ours_ns, costs.claimed_ns, costs.upkeep_ns) > 0
    assert costs.ratio.median > 0
    assert costs.claimed_ratio.median > 0


def test_another_order_than_stocks_is_an_error() -> None:
    stock = queue_ratio._replay(FreeKVCacheBlockQueue, 4)
    ours = queue_ratio._replay(queue_ratio._zoned, 4)
    queue_ratio._check_same_order(stock, ours)
    for replay, moved in ((stock, 1), (ours, 2)):
        block = replay.queue.get_all_free_blocks()[moved]
        replay.queue.remove(block)
        replay.queue.append(block)
    with pytest.raises(RuntimeError, match="left vLLM's order"):
        queue_ratio._check_same_order(stock, ours)
