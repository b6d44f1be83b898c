"""Builders of what a run has recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.demo.client import Completion
from benchmarks.demo.pool_run import PoolRecord
from benchmarks.demo.replay import RunRecord
from benchmarks.demo.server import ServerKind
from tests.benchmarks.demo.fake_server import plan, row

ARMS = (ServerKind.STOCK, ServerKind.TIER, ServerKind.HINTS, ServerKind.WRONG)

#: Two agents with two turns each; the second's are at odd indices.
WORKLOAD = plan(
    [
        row("a/lead", 0, 1, 64),
        row("b/lead", 0.5, 1.5, 64),
        row("a/lead", 2, 3, 128),
        row("b/lead", 2.5, 3.5, 128),
    ]
)


def completion(ttft_s: float, *, cached: int = 0, tokens: int = 3) -> Completion:
    """A request of 64 tokens that takes a second after its first token."""
    return Completion(
        ttft_s=ttft_s,
        latency_s=ttft_s + 1.0,
        prompt_tokens=64,
        cached_tokens=cached,
        completion_tokens=tokens,
    )


def replay(a_s: float, b_s: float, *, duration_s: float = 10.0) -> RunRecord:
    """A pass in which all turns of an agent have the same TTFT."""
    results = {i: completion(b_s if i % 2 else a_s) for i in range(4)}
    return RunRecord(
        results=results, duration_s=duration_s, saved_bytes=100, loaded_bytes=50
    )


def record(replays: Mapping[ServerKind, list[RunRecord]]) -> PoolRecord:
    kinds = [kind for kind in replays if kind is not ServerKind.STOCK]
    return PoolRecord(
        replays=dict(replays),
        stats={kind: {} for kind in kinds},
        control_calls={kind: Counter() for kind in replays},
    )
