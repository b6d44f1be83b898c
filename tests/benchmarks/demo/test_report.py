from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.demo.report import draw, table
from tests.benchmarks.demo.numbers import pool


def test_the_table_has_three_columns_a_pool() -> None:
    pools = {
        "one_third": pool(stock=(1.0, 3.0, 2.0)),
        "two_thirds": pool(label="2/3", hints=(0.25,)),
    }
    head, rule, *rows = table(pools).splitlines()
    assert head == (
        "|  | 1/3 stock | 1/3 tier | 1/3 hints | 2/3 stock | 2/3 tier | 2/3 hints |"
    )
    assert rule == "|---|---:|---:|---:|---:|---:|---:|"
    assert (
        rows[0] == "| TTFT mean (s) | 2.000 | 1.000 | 1.000 | 1.000 | 1.000 | 0.250 |"
    )
    assert rows[1].startswith("| least to most | 1.000-3.000 | 1.000-1.000 |")
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in rows}
    assert cells["MiB moved"] == "3"
    assert cells["prompt tokens from cache"] == "50.0 %"
    assert {line.count("|") for line in [head, rule, *rows]} == {8}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results" / "demo.png"
    draw({"one_third": pool(), "two_thirds": pool(label="2/3")}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
