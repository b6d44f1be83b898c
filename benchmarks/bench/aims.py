"""What the benchmarks aim at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_POOLS = ("100000", "150000", "250000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """One figure of one benchmark and what it should be.

    Attributes:
        run: name of the run in ``suite.RUNS``.
        what: in words.
        path: keys that lead to the figure in the run's JSON.
        at_most: the aim, or
        at_least: the other way round.
        bound: keys that lead to what the clairvoyant optimum reaches in this run.
    """

    run: str
    what: str
    path: tuple[str, ...]
    at_most: float | None = None
    at_least: float | None = None
    bound: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An aim and what was measured; ``measured`` is ``None`` if nothing was."""

    aim: Aim
    measured: float | None
    bound: float | None

    @property
    def is_met(self) -> bool:
        if self.measured is None:
            return False
        if self.aim.at_most is not None:
            return self.measured <= self.aim.at_most
        return self.aim.at_least is not None and self.measured >= self.aim.at_least


def aims() -> list[Aim]:
    """In the order in which they are printed."""
    found = []
    for pool in _POOLS:
        found += _of_pool(pool)
    direct = ("direct", "figures")
    found += [
        _most("agents", "RFC's direct test: TTFT", (*direct, "ttft_ratio_hints"), 0.79),
        _most("agents", "RFC's direct test: TPOT", (*direct, "tpot_ratio_hints"), 1.0),
    ]
    for pool in ("1000000", "2000000", "4000000"):
        for arm in ("session_ids", "hints"):
            path = ("pools", pool, "figures", f"hit_gain_{arm}")
            what = f"chat, {int(pool) // 1_000_000}M: hit over LRU, {arm}"
            found.append(_least("conversation", what, path, -0.005))
    found += [
        _most(
            "no_hint_overhead", "scheduler CPU, no hints", ("cpu_ratio_no_hints",), 1.02
        ),
        _most("no_hint_overhead", "scheduler CPU, hints", ("cpu_ratio_hints",), 1.05),
        _most(
            "no_hint_overhead",
            "the same, 64 requests of 128K tokens, no hints",
            ("cpu_ratio_no_hints_64x128k",),
            1.02,
        ),
        _most(
            "no_hint_overhead",
            "the same, 64 requests of 128K tokens, hints",
            ("cpu_ratio_hints_64x128k",),
            1.05,
        ),
        _most("core_ops", "zoned queue over stock's", ("zoned_queue_ratio",), 1.15),
        _most(
            "core_ops",
            "timer wheel's growth, 10^4 to 10^6, over a dict's",
            ("wheel_growth_over_dict",),
            1.1,
        ),
        _least("transfer", "copies over memcpy, CPU", ("cpu_vs_memcpy",), 0.9),
        _most("transfer", "computing slowed by copies", ("compute_slowdown",), 0.03),
        _most(
            "agent_serving",
            "live: TTFT of bystanders of wrong hints",
            ("ttft_mean_ratio_bystanders",),
            1.10,
        ),
    ]
    return found


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Every aim against the JSON of the runs, by name; a run may be missing."""
    return [
        Verdict(
            aim=aim,
            measured=_find(results.get(aim.run), aim.path),
            bound=None if aim.bound is None else _find(results.get(aim.run), aim.bound),
        )
        for aim in aims()
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown."""
    lines = [
        "| aim | aimed at | measured | clairvoyant, both tiers | met |",
        "| --- | --- | --- | --- | --- |",
    ]
    for verdict in verdicts:
        aim = verdict.aim
        sign, value = (
            ("≤", aim.at_most) if aim.at_most is not None else ("≥", aim.at_least)
        )
        lines.append(
            f"| {aim.what} | {sign} {value:g} | {_text(verdict.measured)} "
            f"| {'' if aim.bound is None else _text(verdict.bound)} "
            f"| {'yes' if verdict.is_met else 'no'} |"
        )
    return "\n".join(lines)


def _of_pool(pool: str) -> list[Aim]:
    where = ("pools", pool, "figures")
    size = f"agents, {int(pool) // 1_000}K"

    def most(what: str, key: str, value: float, bound: str | None = None) -> Aim:
        return Aim(
            run="agents",
            what=f"{size}: {what}",
            path=(*where, key),
            at_most=value,
            bound=None if bound is None else (*where, bound),
        )

    return [
        _least(
            "agents",
            f"{size}: hints alone, way from LRU to optimum",
            (*where, "gap_closed_hints"),
            0.5,
        ),
        most("recomputed tokens, with the tier", "recomputed_ratio_tier", 0.15),
        most("mean TTFT", "ttft_mean_ratio_tier", 0.4254, "ttft_mean_ratio_bound"),
        most("p99 TTFT", "ttft_p99_ratio_tier", 1.0, "ttft_p99_ratio_bound"),
        most("mean time per request", "e2e_ratio_tier", 0.7239, "e2e_ratio_bound"),
        most("TPOT", "tpot_ratio_tier", 1.01, "tpot_ratio_bound"),
        most(
            "mean TTFT against a plain tier",
            "ttft_mean_ratio_vs_plain_tier",
            0.8,
            "ttft_mean_ratio_vs_plain_tier_bound",
        ),
        most(
            "bytes moved against a plain tier",
            "bytes_ratio_vs_plain_tier",
            0.6,
            "bytes_ratio_vs_plain_tier_bound",
        ),
        most("peak of what is kept, hints alone", "peak_ratio_hints", 0.7476),
        most("TTFT of bystanders of wrong hints", "ttft_mean_ratio_bystanders", 1.10),
    ]


def _most(run: str, what: str, path: tuple[str, ...], value: float) -> Aim:
    return Aim(run=run, what=what, path=path, at_most=value)


def _least(run: str, what: str, path: tuple[str, ...], value: float) -> Aim:
    return Aim(run=run, what=what, path=path, at_least=value)


def _find(result: Any, path: Sequence[str]) -> float | None:
    for key in path:
        if not isinstance(result, Mapping) or key not in result:
            return None
        result = result[key]
    return float(result)


def _text(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
