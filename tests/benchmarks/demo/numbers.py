"""Builders of measured numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.demo.comparison import PoolComparison
from benchmarks.demo.measures import Measures
from benchmarks.demo.server import ServerKind

_MEASURES = Measures(
    requests=200,
    ttft_mean_s=1.0,
    ttft_p50_s=0.9,
    ttft_p99_s=3.0,
    tpot_mean_s=0.02,
    e2e_mean_s=1.5,
    tokens_per_s=8000.0,
    requests_per_s=4.0,
    cached_rate=0.5,
    uncached_tokens=1000,
    recomputed_tokens=500,
    peak_cache_use=0.9,
    num_preemptions=0,
    saved_bytes=2 << 20,
    loaded_bytes=1 << 20,
    bytes_moved=3 << 20,
    duration_s=50.0,
)


def measures(**changes: Any) -> Measures:
    return replace(_MEASURES, **changes)


def pool(
    *,
    label: str = "1/3",
    stock: Sequence[float] = (1.0,),
    tier: Sequence[float] = (1.0,),
    hints: Sequence[float] = (1.0,),
) -> PoolComparison:
    """A comparison with these mean TTFTs, one for each repeat."""
    runs = {ServerKind.STOCK: stock, ServerKind.TIER: tier, ServerKind.HINTS: hints}
    return PoolComparison(
        label=label,
        num_blocks=165,
        runs={
            kind: [measures(ttft_mean_s=mean) for mean in means]
            for kind, means in runs.items()
        },
        sam_stats={kind: {"of": kind.value} for kind in ServerKind},
        control_calls=Counter({"offload/accepted": 3, "lease/404": 2}),
    )
