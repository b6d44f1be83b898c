"""Shows the comparison: a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.demo.comparison import PoolComparison
from benchmarks.demo.measures import Measures
from benchmarks.demo.server import ServerKind

_Form = Callable[[float], str]


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}"


_ROWS: tuple[tuple[str, str, _Form], ...] = (
    ("TTFT p50 (s)", "ttft_p50_s", _seconds),
    ("TTFT p99 (s)", "ttft_p99_s", _seconds),
    ("prompt tokens from cache", "cached_rate", _percent),
    ("prompt tokens recomputed", "recomputed_tokens", _count),
    ("prompt tokens computed", "uncached_tokens", _count),
    ("MiB moved", "bytes_moved", _mebibytes),
    ("MiB saved to host memory", "saved_bytes", _mebibytes),
    ("MiB loaded back", "loaded_bytes", _mebibytes),
    ("peak cache use", "peak_cache_use", _percent),
    ("preemptions", "num_preemptions", _count),
    ("duration (s)", "duration_s", lambda value: f"{value:.1f}"),
)
_PANELS: tuple[tuple[str, str, _Form], ...] = (
    ("ttft_mean_s", "mean TTFT (s)", lambda value: f"{value:.2f}"),
    ("cached_rate", "prompt tokens from cache", _percent),
    ("recomputed_tokens", "prompt tokens recomputed", _count),
    ("bytes_moved", "MiB moved", _mebibytes),
)
_COLORS = {
    ServerKind.STOCK: "#9aa5b1",
    ServerKind.TIER: "#d9a441",
    ServerKind.HINTS: "#2f6f9f",
}


def table(pools: Mapping[str, PoolComparison]) -> str:
    """The comparison in Markdown, three columns a pool; medians of the repeats."""
    columns = [(pool, kind) for pool in pools.values() for kind in ServerKind]
    medians = [pool.median(kind) for pool, kind in columns]
    spreads = [pool.ttft_spread_s(kind) for pool, kind in columns]
    lines = [
        _line("", [f"{pool.label} {kind}" for pool, kind in columns]),
        f"|---|{'---:|' * len(columns)}",
        _row("TTFT mean (s)", "ttft_mean_s", _seconds, medians),
        _line("least to most", [f"{low:.3f}-{high:.3f}" for low, high in spreads]),
        *(_row(title, name, form, medians) for title, name, form in _ROWS),
    ]
    return "\n".join(lines)


def _row(title: str, name: str, form: _Form, medians: list[Measures]) -> str:
    return _line(title, [form(getattr(column, name)) for column in medians])


def _line(title: str, cells: list[str]) -> str:
    return f"| {' | '.join([title, *cells])} |"


def draw(pools: Mapping[str, PoolComparison], path: Path) -> None:
    """Bar charts of what matters, one group of bars a pool."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(_PANELS), figsize=(14, 3.6))
    places = range(len(pools))
    for axis, (name, title, form) in zip(axes, _PANELS, strict=True):
        for number, kind in enumerate(ServerKind):
            heights = [getattr(pool.median(kind), name) for pool in pools.values()]
            bars = axis.bar(
                [place + 0.28 * (number - 1) for place in places],
                heights,
                width=0.26,
                color=_COLORS[kind],
                label=kind,
            )
            axis.bar_label(bars, [form(height) for height in heights], fontsize=7)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(places, [pool.label for pool in pools.values()])
        axis.spines[["top", "right"]].set_visible(False)
    # Bytes are labelled in MiB, so that the axis would only say something else.
    axes[-1].set_yticks([])
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("Coding agents on vLLM, pool as a share of the peak live context")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
