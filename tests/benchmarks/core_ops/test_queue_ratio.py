from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.core_ops import queue_ratio
from benchmarks.core_ops.queue_ratio import measure_queues
from sam_connector.core.zoned_queue import ZonedFreeQueue

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 4_500


def test_every_queue_plays_every_pair() -> None:
    costs = measure_queues(NUM_BLOCKS, 3)
    assert min(costs.stock_ns, costs.ours_ns, costs.claimed_ns, costs.upkeep_ns) > 0
    assert costs.ratio.median > 0
    assert costs.claimed_ratio.median > 0


def test_another_order_than_stocks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Reversed(ZonedFreeQueue):
        def append_n(self, blocks: list[object]) -> None:
            super().append_n(blocks[::-1])

    monkeypatch.setattr(queue_ratio, "ZonedFreeQueue", Reversed)
    with pytest.raises(RuntimeError, match=r"left vLLM's order|not on the list"):
        measure_queues(NUM_BLOCKS, 2)
