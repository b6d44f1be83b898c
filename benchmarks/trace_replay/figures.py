"""What is aimed at: ratios between arms, within one draw, and their medians."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.trace_replay.arms import (
    WRONG_SHARE,
    ArmReport,
    Setting,
    mean_ttft,
    report,
)
from benchmarks.trace_replay.hints import wrong_sessions
from benchmarks.trace_replay.records import Replay


def figures(setting: Setting, replays: Mapping[str, Replay]) -> dict[str, float]:
    """Of one draw; ratios are to stock LRU unless the name says otherwise.

    ``..._bound`` is what the clairvoyant optimum of both tiers reaches, whose loads
    take no time; for bytes, its loads alone.
    """
    arms = {name: report(replay) for name, replay in replays.items()}
    lru = arms["lru"]
    found = {f"hit_{name}": arm.hit for name, arm in arms.items()}
    found |= {
        f"hit_gain_{name}": arms[name].hit - lru.hit
        for name in ("session_ids", "hints")
        if name in arms
    }
    if {"hints", "belady"} <= arms.keys():
        gap = arms["belady"].hit - lru.hit
        gain = arms["hints"].hit - lru.hit
        found["gap_closed_hints"] = gain / gap if gap > 0 else 1.0
        found["peak_ratio_hints"] = arms["hints"].kept_peak / lru.kept_peak
        if lru.kept_mean:
            found["kept_mean_ratio_hints"] = arms["hints"].kept_mean / lru.kept_mean
    if "tier" in arms:
        found |= _against(lru, arms["tier"], "tier")
    if "belady_tier" in arms:
        found |= _against(lru, arms["belady_tier"], "bound")
    if {"tier", "plain_tier"} <= arms.keys():
        plain, tier = arms["plain_tier"], arms["tier"]
        found["ttft_mean_ratio_vs_plain_tier"] = tier.ttft_mean_s / plain.ttft_mean_s
        found["bytes_ratio_vs_plain_tier"] = tier.bytes_moved / plain.bytes_moved
        if "belady_tier" in arms:
            bound = arms["belady_tier"].ttft_mean_s
            found["ttft_mean_ratio_vs_plain_tier_bound"] = bound / plain.ttft_mean_s
            # What the optimum brings back; it saves nothing in vain, so nothing.
            loaded = sum(s.loaded_tokens for s in replays["belady_tier"].served)
            num_bytes = loaded * setting.service.kv_bytes_per_token
            found["bytes_ratio_vs_plain_tier_bound"] = num_bytes / plain.bytes_moved
    if {"tier", "wrong"} <= arms.keys():
        wrong = wrong_sessions(setting.workload, WRONG_SHARE)
        others = {t.index for t in setting.workload.turns if t.session not in wrong}
        found["ttft_mean_ratio_bystanders"] = mean_ttft(
            replays["wrong"], others
        ) / mean_ttft(replays["tier"], others)
    if "ours_no_hints" in replays:
        same = replays["ours_no_hints"].served == replays["lru"].served
        found["no_hints_identical"] = float(same)
    return found


def medians(draws: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, over draws."""
    return {name: statistics.median(d[name] for d in draws) for name in draws[0]}


def _against(lru: ArmReport, arm: ArmReport, name: str) -> dict[str, float]:
    pairs = {
        "recomputed": (arm.recomputed_tokens, lru.recomputed_tokens),
        "ttft_mean": (arm.ttft_mean_s, lru.ttft_mean_s),
        "ttft_p99": (arm.ttft_p99_s, lru.ttft_p99_s),
        "tpot": (arm.tpot_mean_s, lru.tpot_mean_s),
        "e2e": (arm.e2e_mean_s, lru.e2e_mean_s),
    }
    return {
        f"{key}_ratio_{name}": ours / theirs if theirs else 1.0
        for key, (ours, theirs) in pairs.items()
    }
