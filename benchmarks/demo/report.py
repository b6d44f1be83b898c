"""Shows the comparison: a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.demo.comparison import PoolComparison
from benchmarks.demo.measures import Measures
from benchmarks.demo.server import ServerKind

_Form = Callable[[float], str]
#: Title, attribute of ``Measures``, and how to write it.
Row = tuple[str, str, _Form]


def seconds(value: float) -> str:
    return f"{value:.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    return f"{value:,.0f}"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}"


DEMO_ROWS: tuple[Row, ...] = (
    ("TTFT p50 (s)", "ttft_p50_s", seconds),
    ("TTFT p99 (s)", "ttft_p99_s", seconds),
    ("prompt tokens from cache", "cached_rate", percent),
    ("prompt tokens recomputed", "recomputed_tokens", count),
    ("prompt tokens computed", "uncached_tokens", count),
    ("MiB moved", "bytes_moved", mebibytes),
    ("MiB saved to host memory", "saved_bytes", mebibytes),
    ("MiB loaded back", "loaded_bytes", mebibytes),
    ("peak cache use", "peak_cache_use", percent),
    ("preemptions", "num_preemptions", count),
    ("duration (s)", "duration_s", lambda value: f"{value:.1f}"),
)
_PANELS: tuple[Row, ...] = (
    ("ttft_mean_s", "mean TTFT (s)", lambda value: f"{value:.2f}"),
    ("cached_rate", "prompt tokens from cache", percent),
    ("recomputed_tokens", "prompt tokens recomputed", count),
    ("bytes_moved", "MiB moved", mebibytes),
)
_COLORS = {
    ServerKind.STOCK: "#9aa5b1",
    ServerKind.TIER: "#d9a441",
    ServerKind.HINTS: "#2f6f9f",
}


def table(pools: Mapping[str, PoolComparison], rows: Sequence[Row] = DEMO_ROWS) -> str:
    """The comparison in Markdown, one column a server; medians of the repeats."""
    columns = [(pool, kind) for pool in pools.values() for kind in pool.runs]
    medians = [pool.median(kind) for pool, kind in columns]
    spreads = [pool.ttft_spread_s(kind) for pool, kind in columns]
    lines = [
        _line("", [f"{pool.label} {kind}".strip() for pool, kind in columns]),
        f"|---|{'---:|' * len(columns)}",
        _row("TTFT mean (s)", "ttft_mean_s", seconds, medians),
        _line("least to most", [f"{low:.3f}-{high:.3f}" for low, high in spreads]),
        *(_row(title, name, form, medians) for title, name, form in rows),
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
        for number, kind in enumerate(_COLORS):
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
