"""All servers: medians over the repeats, and ratios within each repeat."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.demo.comparison import PoolComparison, ratios, rounded, spread
from benchmarks.demo.harness import num_failed
from benchmarks.demo.pool_run import PoolRecord
from benchmarks.demo.replay import RunRecord
from benchmarks.demo.server import ServerKind
from benchmarks.demo.workload import Workload

_HINTS, _STOCK, _TIER = ServerKind.HINTS, ServerKind.STOCK, ServerKind.TIER

#: Of a measure, the value on one server over that on another.
RATIOS: Mapping[str, tuple[str, ServerKind, ServerKind]] = {
    "ttft_mean_ratio_hints": ("ttft_mean_s", _HINTS, _STOCK),
    "ttft_p99_ratio_hints": ("ttft_p99_s", _HINTS, _STOCK),
    "ttft_mean_ratio_tier": ("ttft_mean_s", _TIER, _STOCK),
    "ttft_mean_ratio_vs_tier": ("ttft_mean_s", _HINTS, _TIER),
    "bytes_ratio_vs_tier": ("bytes_moved", _HINTS, _TIER),
    "tpot_ratio_hints": ("tpot_mean_s", _HINTS, _STOCK),
    "e2e_ratio_hints": ("e2e_mean_s", _HINTS, _STOCK),
    "throughput_ratio_hints": ("tokens_per_s", _HINTS, _STOCK),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeasures:
    """Some of the sessions in one pass."""

    requests: int
    ttft_mean_s: float
    uncached_tokens: int


#: Of each pass over a server, in the order of the repeats.
GroupRuns = Mapping[ServerKind, Sequence[GroupMeasures]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingComparison:
    """All servers at one pool size.

    Attributes:
        bystanders: the sessions about which nothing wrong is said on any server.
        wrong: the others; on ``hints`` they are treated right.
    """

    pool: PoolComparison
    bystanders: GroupRuns
    wrong: GroupRuns
    control_calls: Mapping[ServerKind, Counter[str]]

    def order(self) -> list[ServerKind]:
        """From the shortest mean TTFT to the longest."""
        return sorted(
            self.pool.runs, key=lambda kind: self.pool.median(kind).ttft_mean_s
        )

    def mean_ttfts(self) -> dict[str, float]:
        """Medians over the repeats."""
        return {
            kind.value: self.pool.median(kind).ttft_mean_s for kind in self.pool.runs
        }

    def ratios(self) -> dict[str, list[float]]:
        """Each ratio in every repeat."""
        out = {}
        for name, (measure, kind, base) in RATIOS.items():
            runs = self.pool.runs
            out[name] = ratios(
                [getattr(run, measure) for run in runs[kind]],
                [getattr(run, measure) for run in runs[base]],
            )
        out["ttft_mean_ratio_bystanders"] = ratios(
            [run.ttft_mean_s for run in self.bystanders[ServerKind.WRONG]],
            [run.ttft_mean_s for run in self.bystanders[_HINTS]],
        )
        return out

    def median_ratios(self) -> dict[str, float]:
        return {
            name: round(statistics.median(values), 4)
            for name, values in self.ratios().items()
        }

    def as_json(self) -> dict[str, object]:
        return {
            **self.median_ratios(),
            "spreads": {name: spread(values) for name, values in self.ratios().items()},
            "order": [str(kind) for kind in self.order()],
            "arms": {
                str(kind): _plain(self.pool.median(kind)) for kind in self.pool.runs
            },
            "runs": {
                str(kind): [_plain(run) for run in runs]
                for kind, runs in self.pool.runs.items()
            },
            "bystanders": _groups(self.bystanders),
            "wrong_sessions": _groups(self.wrong),
            "control_calls": {
                str(kind): dict(sorted(calls.items()))
                for kind, calls in self.control_calls.items()
            },
            "control_calls_failed_hints": num_failed(self.control_calls[_HINTS]),
        }


def compare(
    record: PoolRecord,
    workload: Workload,
    *,
    num_blocks: int,
    wrong_sessions: Collection[str],
) -> ServingComparison:
    """From everything that was recorded to what is compared."""
    wrong = {turn.index for turn in workload.turns if turn.session in wrong_sessions}
    others = {turn.index for turn in workload.turns} - wrong
    return ServingComparison(
        pool=record.comparison(workload, label="", num_blocks=num_blocks),
        bystanders=_group_runs(record, others),
        wrong=_group_runs(record, wrong),
        control_calls=record.control_calls,
    )


def measure_group(record: RunRecord, indices: Collection[int]) -> GroupMeasures:
    """One pass, as the requests of these turns saw it."""
    results = [record.results[index] for index in indices]
    return GroupMeasures(
        requests=len(results),
        ttft_mean_s=statistics.fmean(done.ttft_s for done in results),
        uncached_tokens=sum(
            done.prompt_tokens - done.cached_tokens for done in results
        ),
    )


def _group_runs(record: PoolRecord, indices: Collection[int]) -> GroupRuns:
    return {
        kind: [measure_group(replay, indices) for replay in record.replays[kind]]
        for kind in (_HINTS, ServerKind.WRONG)
    }


def _groups(runs: GroupRuns) -> dict[str, object]:
    return {
        str(kind): [_plain(measures) for measures in group]
        for kind, group in runs.items()
    }


def _plain(measures: object) -> dict[str, object]:
    values: dict[str, object] = asdict(measures)  # type: ignore[call-overload]
    return {name: rounded(value) for name, value in values.items()}
