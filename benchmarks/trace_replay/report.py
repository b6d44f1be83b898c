"""Tables and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLUMNS = (
    ("hit", "hit", "{:.4f}", 1),
    ("recomputed", "recomputed_tokens", "{:,.0f}", 1),
    ("TTFT mean s", "ttft_mean_s", "{:.3f}", 1),
    ("p50 s", "ttft_p50_s", "{:.3f}", 1),
    ("p99 s", "ttft_p99_s", "{:.2f}", 1),
    ("TPOT ms", "tpot_mean_s", "{:.1f}", 1_000),
    ("E2E s", "e2e_mean_s", "{:.2f}", 1),
    ("use peak", "use_peak", "{:.2f}", 1),
    ("mean", "use_mean", "{:.2f}", 1),
    ("kept peak", "kept_peak", "{:.2f}", 1),
    ("mean", "kept_mean", "{:.2f}", 1),
    ("moved GB", "bytes_moved", "{:,.0f}", 1e-9),
    ("prefetched", "bytes_prefetched", "{:,.0f}", 1e-9),
    ("wasted", "bytes_wasted", "{:,.1f}", 1e-9),
    ("preempted", "num_preemptions", "{:.0f}", 1),
    ("leases broken", "leases_broken", "{:,.0f}", 1),
)

#: Drawn against the size of the cache.
_CURVES = {
    "lru": "stock LRU",
    "session_ids": "session ids alone",
    "hints": "hints",
    "belady": "optimum, GPU alone",
    "plain_tier": "plain host tier",
    "tier": "hints and host tier",
    "belady_tier": "optimum, both tiers",
}


def table(arms: Mapping[str, Mapping[str, float]]) -> str:
    """One row per arm."""
    rows = [["", *(title for title, _, _, _ in COLUMNS)]]
    for name, arm in arms.items():
        cells = (form.format(arm[key] * unit) for _, key, form, unit in COLUMNS)
        rows.append([name, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def draw(
    path: Path, pools: Mapping[int, Mapping[str, Mapping[str, float]]], title: str
) -> None:
    """Hit rate against cache size, one curve per arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sizes = sorted(pools)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, label in _CURVES.items():
        if all(name in pools[size] for size in sizes):
            hits = [pools[size][name]["hit"] for size in sizes]
            is_limit = name.startswith("belady")
            style = "--" if is_limit else "o-"
            axes.plot(_thousands(sizes), hits, style, label=label)
    axes.set_xlabel("GPU cache, thousand tokens")
    axes.set_ylabel("cached / input tokens")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _thousands(sizes: Sequence[int]) -> list[float]:
    return [size / 1_000 for size in sizes]
