"""All figures of the benchmark, in the order they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm import __version__ as vllm_version

from benchmarks.common import machine
from benchmarks.core_ops import index, sessions, tracker, wheel
from benchmarks.core_ops.longest_step import longest_steps
from benchmarks.core_ops.queue_ratio import QueueCosts, measure_queues
from benchmarks.core_ops.timing import Costs, Subject, growth, measure_costs

#: Upper bounds. What grows is the time that memory takes to answer, for any table of
#: that many keys: flat is what grows no more than a plain dict does.
AIMS = {
    "zoned_queue_ratio": 1.15,
    "wheel_growth_over_dict": 1.0,
    "longest_step_us": 1_000.0,
}

SIZES = (10_000, 100_000, 1_000_000)

#: By name: how to build it, and the operations that make up one life or turn.
SUBJECTS: dict[str, tuple[Callable[[int], Subject], Sequence[str]]] = {
    "wheel": (wheel.WheelSubject, wheel.LIFE),
    "index": (index.IndexSubject, index.TURN),
    "sessions": (sessions.SessionsSubject, sessions.LIFE),
    "tracker": (tracker.TrackerSubject, ("add", "lookup", "remove")),
}

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        sizes: numbers of entries, rising.
        num_rounds: of every operation.
        num_pairs: of the queues.
    """

    sizes: Sequence[int] = SIZES
    num_rounds: int = 15
    num_pairs: int = 21


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything, before it is put in order."""

    plan: Plan
    costs: dict[str, Costs] = field(default_factory=dict)
    queues: dict[int, QueueCosts] = field(default_factory=dict)
    steps_us: dict[str, float] = field(default_factory=dict)


def measure(plan: Plan, *, note: Note) -> dict[str, object]:
    """Runs everything."""
    started_s = time.monotonic()
    measured = Measured(plan=plan)
    for size in plan.sizes:
        note(f"free queues of {size:,} blocks")
        measured.queues[size] = measure_queues(size, plan.num_pairs)
    for name, (make, _) in SUBJECTS.items():
        note(f"{name}: {', '.join(f'{size:,}' for size in plan.sizes)} entries")
        measured.costs[name] = measure_costs(make, plan.sizes, plan.num_rounds)
    note(f"longest steps with {plan.sizes[-1]:,} blocks")
    measured.steps_us = longest_steps(plan.sizes[-1])
    return summary(measured) | {
        "vllm": vllm_version,
        **machine(),
        "wall_s": round(time.monotonic() - started_s, 1),
    }


def summary(measured: Measured) -> dict[str, object]:
    """Aimed figures first, then what they are made of."""
    queues, costs = measured.queues, measured.costs
    growths = {name: growth(found, SUBJECTS[name][1]) for name, found in costs.items()}
    dict_growth = growth(costs["wheel"], ["dict"])
    return {
        "benchmark": "core_ops",
        "zoned_queue_ratio": _worst(q.ratio.median for q in queues.values()),
        "zoned_queue_ratio_claimed": _worst(
            q.claimed_ratio.median for q in queues.values()
        ),
        **{f"{name}_growth": round(found, 3) for name, found in growths.items()},
        "dict_growth": round(dict_growth, 3),
        "wheel_growth_over_dict": round(growths["wheel"] / dict_growth, 3),
        "longest_step_us": round(max(measured.steps_us.values()), 1),
        "aims": AIMS,
        "sizes": list(measured.plan.sizes),
        "steps_us": {n: round(us, 1) for n, us in measured.steps_us.items()},
        "queues": {str(size): _queue(found) for size, found in queues.items()},
        "ns_per_op": {
            name: {
                kind: [round(by_size[kind], 1) for by_size in found.values()]
                for kind in next(iter(found.values()))
            }
            for name, found in costs.items()
        },
    }


def _worst(ratios: Iterable[float]) -> float:
    return round(max(ratios), 4)


def _queue(found: QueueCosts) -> dict[str, object]:
    return {
        "stock_ns": round(found.stock_ns, 1),
        "ours_ns": round(found.ours_ns, 1),
        "claimed_ns": round(found.claimed_ns, 1),
        "upkeep_ns": round(found.upkeep_ns, 1),
        "ratio": round(found.ratio.median, 4),
        "ratio_p10_p90": [round(found.ratio.low, 4), round(found.ratio.high, 4)],
        "claimed_ratio": round(found.claimed_ratio.median, 4),
    }
