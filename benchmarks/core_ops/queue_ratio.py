"""The zoned free queue against stock vLLM's, asked for the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from benchmarks.core_ops.agents import Agents, Bound, Replay, Script
from benchmarks.core_ops.timing import cpu_ns
from benchmarks.no_hint_overhead.timing import Ratio, quiet_gc
from sam_connector.core.zoned_queue import ZonedFreeQueue

NUM_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCosts:
    """Nanoseconds for each block that is taken, put back or hit; and ratios.

    Attributes:
        stock_ns: vLLM's queue.
        ours_ns: ours, nothing claimed.
        claimed_ns: ours, every context held, most of them under a lease.
        upkeep_ns: of the claims themselves, for each block as well.
        ratio: ours over stock.
        claimed_ratio: ours with claims over stock.
    """

    stock_ns: float
    ours_ns: float
    claimed_ns: float
    upkeep_ns: float
    ratio: Ratio
    claimed_ratio: Ratio


def measure_queues(num_blocks: int, num_pairs: int) -> QueueCosts:
    """Three queues by turns, each pair of stock and ours on the same calls.

    Claims change what is handed out and so what is hit: the claimed queue plays the
    same agents and is compared by the block.
    """
    times: dict[str, list[float]] = {
        name: [] for name in ("stock", "ours", "claimed", "upkeep")
    }
    plain = Agents(num_blocks, claimed=False)
    held = Agents(num_blocks, claimed=True)
    stock = _replay(FreeKVCacheBlockQueue, num_blocks)
    ours = _replay(_zoned, num_blocks)
    claimed = _replay(_zoned, num_blocks)
    script, claimed_script = plain.fill(), held.fill()
    for replay, filling in (
        (stock, script),
        (ours, script),
        (claimed, claimed_script),
    ):
        _run(replay, filling)
    with quiet_gc():
        for pair in range(num_pairs):
            script, claimed_script = plain.play(NUM_ROUNDS), held.play(NUM_ROUNDS)
            arms: list[tuple[str, Replay]] = [("stock", stock), ("ours", ours)]
            for name, replay in arms if pair % 2 else reversed(arms):
                times[name].append(_run(replay, script)[False])
            found = _run(claimed, claimed_script)
            times["claimed"].append(found[False])
            times["upkeep"].append(found[True])
    _check_same_order(stock, ours)
    claimed.queue.check_integrity()
    return QueueCosts(
        stock_ns=statistics.median(times["stock"]),
        ours_ns=statistics.median(times["ours"]),
        claimed_ns=statistics.median(times["claimed"]),
        upkeep_ns=statistics.median(times["upkeep"]),
        ratio=Ratio.of(times["ours"], times["stock"]),
        claimed_ratio=Ratio.of(times["claimed"], times["stock"]),
    )


def _replay(make: Callable[[list[KVCacheBlock]], Any], num_blocks: int) -> Replay:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks + 1)]
    return Replay(make(blocks[1:]), blocks)


def _zoned(blocks: list[KVCacheBlock]) -> ZonedFreeQueue:
    return ZonedFreeQueue(blocks, len(blocks) + 1)


def _run(replay: Replay, script: Script) -> dict[bool, float]:
    """Nanoseconds per block of the queue's calls, and of the claims' upkeep."""
    total_ns = {False: 0, True: 0}
    for is_claim, calls in replay.prepare(script):
        total_ns[is_claim] += cpu_ns(lambda calls=calls: _call(calls))
        total_ns[is_claim] -= cpu_ns(lambda calls=calls: _call_nothing(calls))
    return {kind: ns / script.num_blocks for kind, ns in total_ns.items()}


def _call(calls: Sequence[Bound]) -> None:
    for call, argument in calls:
        call(argument)


def _call_nothing(calls: Sequence[Bound]) -> None:
    """What the loop itself costs."""
    for _call, _argument in calls:
        pass


def _check_same_order(stock: Replay, ours: Replay) -> None:
    orders = [
        [block.block_id for block in replay.queue.get_all_free_blocks()]
        for replay in (stock, ours)
    ]
    if orders[0] != orders[1]:
        raise RuntimeError("the zoned queue has left vLLM's order")
