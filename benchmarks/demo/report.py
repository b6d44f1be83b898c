"""Shows the comparison: a table, a picture, one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.demo.measures import Measures

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("TTFT mean (s)", "ttft_mean_s", ".3f"),
    ("TTFT p50 (s)", "ttft_p50_s", ".3f"),
    ("TTFT p99 (s)", "ttft_p99_s", ".3f"),
    ("prompt tokens from cache", "cached_rate", ".1%"),
    ("prompt tokens recomputed", "recomputed_tokens", ",d"),
    ("prompt tokens computed", "uncached_tokens", ",d"),
    ("peak cache use", "peak_cache_use", ".1%"),
    ("preemptions", "num_preemptions", "d"),
    ("duration (s)", "duration_s", ".1f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolComparison:
    """Both servers at one pool size.

    Attributes:
        sam_stats: ``/v1/agent/stats`` of ours after the replay.
    """

    label: str
    num_blocks: int
    stock: Measures
    hints: Measures
    sam_stats: Mapping[str, object]

    def as_json(self) -> dict[str, object]:
        out: dict[str, object] = {
            "pool_blocks": self.num_blocks,
            "requests": min(self.stock.requests, self.hints.requests),
            "ttft_ratio": round(self.hints.ttft_mean_s / self.stock.ttft_mean_s, 4),
        }
        for name, measures in (("stock", self.stock), ("hints", self.hints)):
            for key, value in asdict(measures).items():
                if key != "requests":
                    out[_suffixed(key, name)] = _rounded(value)
        out["sam_stats"] = dict(self.sam_stats)
        return out


def _suffixed(key: str, name: str) -> str:
    """``ttft_mean_s`` becomes ``ttft_mean_stock_s``: the unit stays last."""
    if key.endswith("_s"):
        return f"{key.removesuffix('_s')}_{name}_s"
    return f"{key}_{name}"


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def table(pools: Mapping[str, PoolComparison]) -> str:
    """The comparison as text, two columns a pool."""
    heads = [
        f"{pool.label} {name}" for pool in pools.values() for name in ("stock", "hints")
    ]
    lines = ["".join([f"{'':26}", *(f"{head:>18}" for head in heads)])]
    for title, attribute, form in _ROWS:
        cells = [
            format(getattr(measures, attribute), form)
            for pool in pools.values()
            for measures in (pool.stock, pool.hints)
        ]
        lines.append("".join([f"{title:26}", *(f"{cell:>18}" for cell in cells)]))
    return "\n".join(lines)


def draw(pools: Mapping[str, PoolComparison], path: Path) -> None:
    """Three bar charts of what matters, one group of bars a pool."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("ttft_mean_s", "mean TTFT (s)", ".2f"),
        ("cached_rate", "prompt tokens from cache", ".1%"),
        ("recomputed_tokens", "prompt tokens recomputed", ",d"),
    )
    servers = ((-0.2, "stock", "#9aa5b1"), (0.2, "hints", "#2f6f9f"))
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.6))
    for axis, (attribute, title, form) in zip(axes, panels, strict=True):
        for shift, name, color in servers:
            heights = [
                getattr(getattr(pool, name), attribute) for pool in pools.values()
            ]
            places = [place + shift for place in range(len(heights))]
            bars = axis.bar(places, heights, width=0.38, color=color, label=name)
            axis.bar_label(
                bars, [format(height, form) for height in heights], fontsize=8
            )
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(pools)), [pool.label for pool in pools.values()])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("Coding agents on vLLM, pool as a share of the peak live context")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
