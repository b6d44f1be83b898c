"""All figures of the benchmark, in the order they are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from vllm import __version__ as vllm_version

from benchmarks.common import machine
from benchmarks.no_hint_overhead import footprint, long_context, mix, running
from benchmarks.no_hint_overhead.timing import Ratio, quiet_gc

AIMS = {
    "cpu_ratio_no_hints": 1.02,
    "cpu_ratio_hints": 1.05,
    "cpu_ratio_no_hints_tier": 1.02,
    "cpu_ratio_hints_tier": 1.05,
    "finish_ratio_4096": 1.25,
    "cpu_ratio_no_hints_64x128k": 1.02,
    "cpu_ratio_hints_64x128k": 1.05,
}

#: The arms by name; stock runs twice to show its own spread.
ARMS: dict[str, mix.Arm] = {
    "stock": mix.Arm(connector="null"),
    "no_hints": mix.Arm(connector="sam"),
    "hints": mix.Arm(connector="sam", hinter=mix.agent_hint),
    "no_hints_tier": mix.Arm(connector="sam", settings=mix.WITH_TIER),
    "hints_tier": mix.Arm(
        connector="sam", hinter=mix.agent_hint, settings=mix.WITH_TIER
    ),
    "stock_again": mix.Arm(connector="null"),
}

Note = Callable[[str], None]


def measure(num_pairs: int, *, note: Note) -> dict[str, object]:
    """Runs everything; ratios are medians over ``num_pairs`` interleaved pairs."""
    started_s = time.monotonic()
    times_s = measure_mix(mix.MixShape(), num_pairs, note=note)
    note("completions of a 4,096-block context")
    # A completion takes a millisecond, so many more pairs are affordable.
    ours_ns, stock_ns = long_context.completion_pairs(5 * num_pairs)
    note("evict and expiry of that session")
    worst = long_context.worst_steps()
    note("64 requests with contexts of 128K tokens")
    running_costs = running.measure_running(running.Shape())
    note("memory for each block")
    memory = footprint.measure_footprint()
    summary: dict[str, object] = {"benchmark": "no_hint_overhead", "pairs": num_pairs}
    stock_s = times_s["stock"]
    for name, arm in (
        ("cpu_ratio_no_hints", "no_hints"),
        ("cpu_ratio_hints", "hints"),
        ("cpu_ratio_no_hints_tier", "no_hints_tier"),
        ("cpu_ratio_hints_tier", "hints_tier"),
        ("cpu_ratio_stock_self", "stock_again"),
    ):
        summary |= _ratio(name, Ratio.of(times_s[arm], stock_s))
    summary |= _ratio("finish_ratio_4096", Ratio.of(ours_ns, stock_ns))
    summary |= _running(running_costs) | _footprint(memory)
    summary |= {
        "stock_cpu_s": round(statistics.median(stock_s), 4),
        "finish_stock_us": round(statistics.median(stock_ns) / 1e3, 1),
        "finish_hints_us": round(statistics.median(ours_ns) / 1e3, 1),
        "worst_step_ms": round(worst.worst_ms, 3),
        "worst_step_evict_ms": round(worst.evict_ms, 3),
        "worst_step_edit_ms": round(worst.edit_ms, 3),
        "worst_step_expiry_ms": round(worst.expiry_ms, 3),
        "worst_step_traffic_only_ms": round(worst.traffic_ms, 3),
        "aims": AIMS,
        "vllm": vllm_version,
        **machine(),
        "wall_s": round(time.monotonic() - started_s, 1),
    }
    return summary


def measure_mix(
    shape: mix.MixShape, num_pairs: int, *, note: Note
) -> dict[str, list[float]]:
    """CPU seconds of every arm, once per pair; arms take turns by the round."""
    rounds = mix.plan(shape)
    times_s: dict[str, list[float]] = {name: [] for name in ARMS}
    for pair in range(-1, num_pairs):
        note("warm-up" if pair < 0 else f"pair {pair + 1} of {num_pairs}")
        runs = [(name, mix.MixRun(shape, rounds, arm)) for name, arm in ARMS.items()]
        with quiet_gc():
            for turn in range(len(rounds)):
                shift = (pair + turn) % len(runs)
                for _, run in runs[shift:] + runs[:shift]:
                    run.serve_round()
        for name, run in runs:
            cpu_s = run.close()
            if pair >= 0:
                times_s[name].append(cpu_s)
    return times_s


def _running(costs: Mapping[str, running.RunningCosts]) -> dict[str, object]:
    found: dict[str, object] = {}
    for arm, cost in costs.items():
        found |= _ratio(f"cpu_ratio_{arm}_64x128k", cost.step)
        found |= _ratio(f"finish_ratio_{arm}_64x128k", cost.finish)
        found[f"admit_ratio_{arm}_64x128k"] = round(cost.admit, 4)
        found["stock_step_64x128k_us"] = round(cost.stock_step_us, 1)
    return found


def _footprint(memory: footprint.Footprint) -> dict[str, object]:
    return {
        "metadata_bytes_per_block": round(memory.ours, 1),
        "metadata_bytes_per_block_stock": round(memory.stock, 1),
        "metadata_bytes_per_block_parts": {
            name: round(size, 1)
            for name, size in sorted(memory.parts.items(), key=lambda part: -part[1])
            if size >= 0.05
        },
    }


def _ratio(name: str, ratio: Ratio) -> dict[str, object]:
    return {
        name: round(ratio.median, 4),
        f"{name}_p10_p90": [round(ratio.low, 4), round(ratio.high, 4)],
    }
