"""The arms of a replay, and what is reported of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.trace_replay.belady import BeladyPolicy
from benchmarks.trace_replay.hints import HintRules
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import Replay, ServiceModel
from benchmarks.trace_replay.sam_policy import SamPolicy
from benchmarks.trace_replay.server import VirtualServer
from benchmarks.trace_replay.workload import Workload

#: One session in five is wrong about itself.
WRONG_SHARE = 0.2

#: The clairvoyant arms need a timeline to look ahead on. They run on that of the LRU
#: arm, then again on their own, and the better run counts.
_BELADY_PASSES = 2

#: The arms that an open loop without sessions of its own is worth.
OPEN_LOOP_ARMS = ("lru", "ours_no_hints", "session_ids", "hints", "belady")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """One arm; tokens and bytes are counts, times virtual seconds.

    Attributes:
        hit: cached tokens over input tokens, at the first admission of each request.
        recomputed_tokens: prefilled although the same content was computed before.
        use_peak: largest share of the pool held by running requests.
        kept_peak: largest share in use or kept.
        bytes_wasted: of prefetches that no request used.
        leases_broken: blocks taken away under a live deadline.
    """

    hit: float
    recomputed_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    e2e_mean_s: float
    makespan_s: float
    use_peak: float
    use_mean: float
    kept_peak: float
    kept_mean: float
    bytes_moved: int
    bytes_prefetched: int
    bytes_wasted: int
    num_preemptions: int
    leases_broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all arms of one run have in common.

    Attributes:
        host_ratio: tokens of the host tier over those of the GPU's.
        rules: what the harness says; the arms differ from it in one thing each.
    """

    workload: Workload
    gpu_tokens: int
    host_ratio: float
    rules: HintRules
    service: ServiceModel

    @property
    def host_tokens(self) -> int:
        return int(self.gpu_tokens * self.host_ratio)

    def tier(self, save_policy: str) -> dict[str, object]:
        """Settings of the host tier."""
        num_bytes = self.host_tokens * self.service.kv_bytes_per_token
        return {"host_bytes": num_bytes, "save_policy": save_policy}


def policies(setting: Setting) -> dict[str, Callable[[], Policy]]:
    """How to make each arm's policy, but for the clairvoyant ones."""
    rules = setting.rules
    with_tier = replace(rules, offload_waiting=True)
    return {
        "lru": Policy,
        "ours_no_hints": lambda: SamPolicy("ours_no_hints"),
        "plain_tier": lambda: SamPolicy("plain_tier", None, setting.tier("all")),
        "session_ids": lambda: SamPolicy("session_ids", HintRules.session_ids()),
        "hints_no_evict": lambda: SamPolicy(
            "hints_no_evict", replace(rules, evict_at_end=False)
        ),
        "hints": lambda: SamPolicy("hints", rules),
        "hints_expected": lambda: SamPolicy(
            "hints_expected", replace(rules, expect_resume=True)
        ),
        "tier": lambda: SamPolicy("tier", with_tier, setting.tier("hinted")),
        "wrong": lambda: SamPolicy(
            "wrong",
            replace(with_tier, wrong_share=WRONG_SHARE),
            setting.tier("hinted"),
        ),
    }


def run_arms(setting: Setting, names: Collection[str] | None) -> dict[str, Replay]:
    """Runs the arms that are named, all if ``None``; stock LRU always."""

    def run(policy: Policy) -> Replay:
        server = VirtualServer(
            setting.workload,
            pool_tokens=setting.gpu_tokens,
            policy=policy,
            service=setting.service,
        )
        return server.run()

    makers = policies(setting)
    wanted = [*makers, "belady", "belady_tier"] if names is None else ["lru", *names]
    replays: dict[str, Replay] = {}
    for name in dict.fromkeys(wanted):
        if name in makers:
            replays[name] = run(makers[name]())
    for name in ("belady", "belady_tier"):
        if name in wanted:
            host_tokens = setting.host_tokens if name == "belady_tier" else 0
            replays[name] = _clairvoyant(run, replays["lru"], host_tokens)
    return replays


def _clairvoyant(
    run: Callable[[Policy], Replay], stock: Replay, host_tokens: int
) -> Replay:
    timeline = stock
    runs = []
    for _ in range(_BELADY_PASSES):
        arrivals = [served.arrival_s for served in timeline.served]
        timeline = run(BeladyPolicy(arrivals, host_tokens=host_tokens))
        runs.append(timeline)
    return max(runs, key=hit_rate)


def hit_rate(replay: Replay) -> float:
    cached = sum(served.cached_tokens for served in replay.served)
    return cached / sum(served.input_tokens for served in replay.served)


def mean_ttft(replay: Replay, indices: Collection[int] | None = None) -> float:
    """Of these turns, or of all."""
    return statistics.fmean(
        served.ttft_s
        for served in replay.served
        if indices is None or served.index in indices
    )


def report(replay: Replay) -> ArmReport:
    served = replay.served
    ttfts_s = [one.ttft_s for one in served]
    tpots_s = [one.tpot_s for one in served if one.tpot_s is not None]
    return ArmReport(
        hit=hit_rate(replay),
        recomputed_tokens=sum(one.recomputed_tokens for one in served),
        ttft_mean_s=statistics.fmean(ttfts_s),
        ttft_p50_s=_percentile(ttfts_s, 50),
        ttft_p99_s=_percentile(ttfts_s, 99),
        tpot_mean_s=statistics.fmean(tpots_s) if tpots_s else 0.0,
        e2e_mean_s=statistics.fmean(one.e2e_s for one in served),
        makespan_s=max(one.end_s for one in served),
        use_peak=replay.use_peak,
        use_mean=replay.use_mean,
        kept_peak=replay.kept_peak,
        kept_mean=replay.kept_mean,
        bytes_moved=replay.bytes_moved,
        bytes_prefetched=replay.bytes_prefetched,
        bytes_wasted=replay.bytes_wasted,
        num_preemptions=replay.num_preemptions,
        leases_broken=replay.counts.get("leases_broken", 0),
    )


def median_report(reports: Sequence[ArmReport]) -> ArmReport:
    """Field by field, over several draws."""
    fields: Mapping[str, float] = {
        name: statistics.median(getattr(one, name) for one in reports)
        for name in ArmReport.__slots__
    }
    return ArmReport(**fields)  # type: ignore[arg-type]


def _percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank, so that it is a value that occurred."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]
