"""From the recorded answers of one replay to the numbers that are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.demo.client import Completion
from benchmarks.demo.replay import RunRecord
from benchmarks.demo.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One server at one pool size.

    Attributes:
        cached_rate: cached prompt tokens over all prompt tokens.
        uncached_tokens: prompt tokens that were computed.
        recomputed_tokens: those of them that an earlier request had already
            computed, in whole blocks: what a larger cache or a better choice of
            what to keep would have saved.
        peak_cache_use: largest share of the pool that running requests held.
        bytes_moved: between the KV cache and host memory, both ways together.
        tpot_mean_s: seconds for each token after the first, averaged over the
            requests that made more than one; 0 if none did.
        e2e_mean_s: of a request, from sending it to its last token.
        tokens_per_s: prompt and generated tokens over the duration.
    """

    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    e2e_mean_s: float
    tokens_per_s: float
    requests_per_s: float
    cached_rate: float
    uncached_tokens: int
    recomputed_tokens: int
    peak_cache_use: float
    num_preemptions: int
    saved_bytes: int
    loaded_bytes: int
    bytes_moved: int
    duration_s: float


def measure(record: RunRecord, workload: Workload, block_size: int) -> Measures:
    results = record.results
    ttft = sorted(done.ttft_s for done in results.values())
    prompt = sum(done.prompt_tokens for done in results.values())
    generated = sum(done.completion_tokens for done in results.values())
    cached = sum(done.cached_tokens for done in results.values())
    recomputed = 0
    for turn in workload.turns:
        reusable = reusable_tokens(turn.seen_tokens, turn.num_prompt_tokens, block_size)
        recomputed += max(0, reusable - results[turn.index].cached_tokens)
    return Measures(
        requests=len(results),
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p50_s=percentile(ttft, 0.50),
        ttft_p99_s=percentile(ttft, 0.99),
        tpot_mean_s=tpot_mean_s(results.values()),
        e2e_mean_s=statistics.fmean(done.latency_s for done in results.values()),
        tokens_per_s=(prompt + generated) / record.duration_s,
        requests_per_s=len(results) / record.duration_s,
        cached_rate=cached / prompt,
        uncached_tokens=prompt - cached,
        recomputed_tokens=recomputed,
        peak_cache_use=record.peak_cache_use,
        num_preemptions=record.num_preemptions,
        saved_bytes=record.saved_bytes,
        loaded_bytes=record.loaded_bytes,
        bytes_moved=record.saved_bytes + record.loaded_bytes,
        duration_s=record.duration_s,
    )


def tpot_mean_s(results: Iterable[Completion]) -> float:
    """Mean of the time for each token after a request's first."""
    times = [
        (done.latency_s - done.ttft_s) / (done.completion_tokens - 1)
        for done in results
        if done.completion_tokens > 1
    ]
    return statistics.fmean(times) if times else 0.0


def median(runs: Sequence[Measures]) -> Measures:
    """Number by number; of an even number of counts the lower of the middle two."""
    values: dict[str, Any] = {}
    for spec in fields(Measures):
        column = [getattr(run, spec.name) for run in runs]
        counts = all(isinstance(value, int) for value in column)
        values[spec.name] = (statistics.median_low if counts else statistics.median)(
            column
        )
    return Measures(**values)


def reusable_tokens(seen: int, prompt: int, block_size: int) -> int:
    """Most tokens the engine could have taken from its cache: whole blocks that were
    seen before, and never the last token, whose logits are needed."""
    return min(seen, prompt - 1) // block_size * block_size


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
