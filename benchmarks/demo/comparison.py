"""Servers at one pool size: medians over the repeats, ratios, spreads.

Every number is the median over the repeats. The two ratios are medians as well, of
the ratio within each repeat: the servers of a repeat ran one after another, so that
a machine that is slower for a while slows all of them. They can differ a little from
the ratio of the medians beside them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.demo.harness import num_failed
from benchmarks.demo.measures import Measures, median
from benchmarks.demo.server import ServerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolComparison:
    """All servers at one pool size.

    Attributes:
        runs: one for each repeat, in order.
        sam_stats: ``/v1/agent/stats`` of ours after the last repeat; counters count
            from the server's start.
        control_calls: how often each call of the harness had which outcome, in all
            repeats together.
    """

    label: str
    num_blocks: int
    runs: Mapping[ServerKind, Sequence[Measures]]
    sam_stats: Mapping[ServerKind, Mapping[str, object]]
    control_calls: Counter[str]

    def median(self, kind: ServerKind) -> Measures:
        return median(self.runs[kind])

    def ttft_spread_s(self, kind: ServerKind) -> tuple[float, float]:
        """Least and greatest mean TTFT of a repeat."""
        means = [run.ttft_mean_s for run in self.runs[kind]]
        return min(means), max(means)

    def ttft_ratio(self, base: ServerKind) -> float:
        """Mean TTFT with hints over that of ``base``."""
        return statistics.median(self._ttft_ratios(base))

    def as_json(self) -> dict[str, object]:
        """Everything, flat; each server's numbers carry its name."""
        out: dict[str, object] = {
            "pool_blocks": self.num_blocks,
            "requests": min(
                run.requests for runs in self.runs.values() for run in runs
            ),
            "ttft_ratio": round(self.ttft_ratio(ServerKind.STOCK), 4),
            "ttft_ratio_vs_tier": round(self.ttft_ratio(ServerKind.TIER), 4),
            "ttft_ratio_spread": spread(self._ttft_ratios(ServerKind.STOCK)),
            "ttft_ratio_vs_tier_spread": spread(self._ttft_ratios(ServerKind.TIER)),
        }
        for kind in self.runs:
            for key, value in asdict(self.median(kind)).items():
                if key != "requests":
                    out[_suffixed(key, kind)] = rounded(value)
            out[_suffixed("ttft_mean_spread_s", kind)] = spread(
                self.ttft_spread_s(kind)
            )
        out["control_calls"] = dict(sorted(self.control_calls.items()))
        out["control_calls_failed"] = num_failed(self.control_calls)
        out["sam_stats"] = dict(self.sam_stats[ServerKind.HINTS])
        out["sam_stats_tier"] = dict(self.sam_stats[ServerKind.TIER])
        return out

    def _ttft_ratios(self, base: ServerKind) -> list[float]:
        hints = [run.ttft_mean_s for run in self.runs[ServerKind.HINTS]]
        return ratios(hints, [run.ttft_mean_s for run in self.runs[base]])


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Of each repeat's value over the same repeat's base."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def _suffixed(key: str, name: str) -> str:
    """``ttft_mean_s`` becomes ``ttft_mean_stock_s``: a plain unit stays last."""
    if key.endswith("_s") and not key.endswith("_per_s"):
        return f"{key.removesuffix('_s')}_{name}_s"
    return f"{key}_{name}"


def spread(values: Sequence[float]) -> list[float]:
    """Least and greatest."""
    return [round(min(values), 4), round(max(values), 4)]


def rounded(value: object) -> object:
    """A fraction cut to what means something; anything else as it is."""
    return round(value, 4) if isinstance(value, float) else value
