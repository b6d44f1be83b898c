"""The arms of one pool size, and what is reported of each."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.trace_replay.belady import BeladyPolicy
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import Replay, ServiceModel
from benchmarks.trace_replay.sam_policy import HintRules, SamPolicy
from benchmarks.trace_replay.server import VirtualServer
from benchmarks.trace_replay.workload import Workload

#: The clairvoyant arm needs a timeline to look ahead on; it is run on that of the
#: LRU arm, then again on its own, and the better run counts.
BELADY_PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """One arm on one pool; tokens are counts, times virtual seconds.

    Attributes:
        hit: cached tokens over input tokens, at the first admission of each request.
        recomputed_tokens: prefilled although the same content was computed before.
        use_peak: largest share of the pool held by running requests.
        use_mean: the same, averaged over time.
        leases_broken: blocks taken away under a live deadline.
    """

    hit: float
    recomputed_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    use_peak: float
    use_mean: float
    num_preemptions: int
    leases_broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """All arms on one pool.

    Attributes:
        gap_closed: how far the hints get from LRU (0) to Belady (1).
        no_hints_identical: every request of the arm without hints had the same
            cached tokens and the same times as with stock LRU.
    """

    gpu_tokens: int
    hit_lru: float
    hit_ours_no_hints: float
    hit_hints: float
    hit_belady: float
    gap_closed: float
    no_hints_identical: bool
    arms: dict[str, ArmReport]


def run_pool(
    workload: Workload,
    gpu_tokens: int,
    *,
    rules: HintRules,
    service: ServiceModel,
    note: Callable[[str], None],
) -> PoolReport:
    """Runs the four arms on a pool of ``gpu_tokens``."""

    def run(policy: Policy) -> Replay:
        note(f"{gpu_tokens:,} tokens: {policy.name}")
        server = VirtualServer(
            workload, pool_tokens=gpu_tokens, policy=policy, service=service
        )
        return server.run()

    stock = run(Policy())
    without = SamPolicy()
    no_hints = run(without)
    with_hints = SamPolicy(rules)
    hints = run(with_hints)
    belady = _best_belady(run, stock)
    arms = {
        "lru": _report(stock),
        without.name: _report(no_hints, without),
        with_hints.name: _report(hints, with_hints),
        "belady": _report(belady),
    }
    hit_lru, hit_belady = arms["lru"].hit, arms["belady"].hit
    gap = hit_belady - hit_lru
    return PoolReport(
        gpu_tokens=gpu_tokens,
        hit_lru=hit_lru,
        hit_ours_no_hints=arms["ours_no_hints"].hit,
        hit_hints=arms["hints"].hit,
        hit_belady=hit_belady,
        gap_closed=(arms["hints"].hit - hit_lru) / gap if gap > 0 else 0.0,
        no_hints_identical=no_hints.served == stock.served,
        arms=arms,
    )


def jittered(workload: Workload, seed: int, *, max_shift_s: float = 30.0) -> Workload:
    """The same agents, each task started up to ``max_shift_s`` later.

    One closed-loop run is one draw: a request that slips by a millisecond can change
    who waits for whom. Several show what is policy and what is luck.
    """
    rng = random.Random(seed)
    turns = [
        replace(turn, offset_s=turn.offset_s + rng.uniform(0.0, max_shift_s))
        if turn.after is None
        else turn
        for turn in workload.turns
    ]
    return replace(workload, turns=turns)


def as_json(report: PoolReport) -> dict[str, object]:
    """The report with figures cut to what means something."""
    plain = _rounded(asdict(report))
    assert isinstance(plain, dict)
    return plain


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _best_belady(run: Callable[[Policy], Replay], stock: Replay) -> Replay:
    timeline = stock
    best: Replay | None = None
    for _ in range(BELADY_PASSES):
        timeline = run(BeladyPolicy([served.arrival_s for served in timeline.served]))
        if best is None or _hit(timeline) > _hit(best):
            best = timeline
    assert best is not None
    return best


def _hit(replay: Replay) -> float:
    cached = sum(served.cached_tokens for served in replay.served)
    return cached / sum(served.input_tokens for served in replay.served)


def _report(replay: Replay, policy: Policy | None = None) -> ArmReport:
    ttfts_s = [served.ttft_s for served in replay.served]
    return ArmReport(
        hit=_hit(replay),
        recomputed_tokens=sum(served.recomputed_tokens for served in replay.served),
        ttft_mean_s=statistics.fmean(ttfts_s),
        ttft_p50_s=_percentile(ttfts_s, 50),
        ttft_p99_s=_percentile(ttfts_s, 99),
        use_peak=replay.use_peak,
        use_mean=replay.use_mean,
        num_preemptions=replay.num_preemptions,
        leases_broken=policy.num_leases_broken() if policy is not None else 0,
    )


def _percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank, so that it is a value that occurred."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]
