"""What the connector keeps in memory for each block that a session holds.

Measured on the whole process by ``tracemalloc``: the same sessions are served with
ours and with a connector that does nothing, at two sizes of the pool. What all of it
grows by from one size to the other is for blocks; what is there once is not.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler

from benchmarks.no_hint_overhead.mix import BLOCK_SIZE
from benchmarks.scheduler_harness import (
    VOCAB_SIZE,
    check_idle_pool,
    make_request,
    make_scheduler,
    run_step,
)

CONTEXT_BLOCKS = 512
#: Sessions that fill a pool, at the smaller and at the larger size.
NUM_SESSIONS = (8, 40)
TTL_S = 600.0
_OURS = "/sam_connector/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes for each block.

    Attributes:
        ours: that the connector adds.
        stock: that vLLM keeps itself.
        parts: of ``ours``, by the module that allocated them. ``vllm`` are objects of
            vLLM's, block hashes, that live longer since we refer to them.
    """

    ours: float
    stock: float
    parts: Mapping[str, float]


def measure_footprint() -> Footprint:
    stock = _growth("null")
    ours = _growth("sam")
    total = sum(ours.values()) - sum(stock.values())
    parts = {name: size for name, size in ours.items() if name != "vllm"}
    parts["vllm"] = total - sum(parts.values())
    return Footprint(ours=total, stock=sum(stock.values()), parts=parts)


def _growth(connector: str) -> dict[str, float]:
    """Bytes for each further block, by module."""
    # What is imported and set up the first time is not for blocks.
    _filled(connector, 1).shutdown()
    small, large = (_memory(connector, count) for count in NUM_SESSIONS)
    num_blocks = (NUM_SESSIONS[1] - NUM_SESSIONS[0]) * CONTEXT_BLOCKS
    return {
        name: (large.get(name, 0) - small.get(name, 0)) / num_blocks
        for name in large.keys() | small.keys()
    }


def _memory(connector: str, num_sessions: int) -> dict[str, int]:
    """Bytes in use once sessions have filled the pool and no request is left."""
    gc.collect()
    tracemalloc.start()
    try:
        scheduler = _filled(connector, num_sessions)
        gc.collect()
        snapshot = tracemalloc.take_snapshot()
        scheduler.shutdown()
    finally:
        tracemalloc.stop()
    sizes = {"vllm": 0}
    for statistic in snapshot.statistics("filename"):
        _, is_ours, module = statistic.traceback[0].filename.partition(_OURS)
        name = module if is_ours else "vllm"
        sizes[name] = sizes.get(name, 0) + statistic.size
    return sizes


def _filled(connector: str, num_sessions: int) -> Scheduler:
    num_tokens = CONTEXT_BLOCKS * BLOCK_SIZE
    scheduler = make_scheduler(
        connector,
        num_blocks=num_sessions * CONTEXT_BLOCKS + 2,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=2 * num_tokens,
        max_model_len=2 * num_tokens,
    )
    rng = random.Random(0)
    for number in range(num_sessions):
        hint = {"session_id": f"agent-{number}", "cache_control": {"ttl": TTL_S}}
        scheduler.add_request(
            make_request(
                f"request-{number}",
                # The one token of the answer has no KV: every block is full.
                rng.choices(range(VOCAB_SIZE), k=num_tokens),
                agent_hint=hint,
                block_size=BLOCK_SIZE,
            )
        )
        while scheduler.has_unfinished_requests():
            run_step(scheduler)
    run_step(scheduler)
    check_idle_pool(scheduler)
    return scheduler
