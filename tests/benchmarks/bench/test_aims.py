from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench.aims import Aim, Verdict, aims, judge, table
from benchmarks.bench.suite import RUNS


def test_every_aim_is_of_a_run_and_has_one_limit() -> None:
    assert {aim.run for aim in aims()} == set(RUNS)
    assert all((aim.at_most is None) != (aim.at_least is None) for aim in aims())
    assert len({aim.what for aim in aims()}) == len(aims())


@pytest.mark.parametrize(
    ("limit", "measured", "is_met"),
    [
        ({"at_most": 1.0}, 1.0, True),
        ({"at_most": 1.0}, 1.01, False),
        ({"at_least": 0.5}, 0.5, True),
        ({"at_least": 0.5}, 0.49, False),
        ({"at_least": 0.5}, None, False),
    ],
)
def test_met_or_not(
    limit: dict[str, float], measured: float | None, is_met: bool
) -> None:
    aim = Aim(run="core_ops", what="it", path=("x",), **limit)
    assert Verdict(aim=aim, measured=measured, bound=None).is_met is is_met


def test_figures_are_found_where_the_benchmarks_put_them() -> None:
    results: dict[str, Any] = {
        "core_ops": {"zoned_queue_ratio": 1.0},
        "agents": {"pools": {"100000": {"figures": {"ttft_mean_ratio_tier": 0.6}}}},
    }
    found = {v.aim.what: v.measured for v in judge(results)}
    assert found["zoned queue over stock's"] == 1.0
    assert found["agents, 100K: mean TTFT"] == 0.6
    assert found["agents, 150K: mean TTFT"] is None


def test_the_table_says_what_could_not_be_bettered() -> None:
    aim = Aim(run="agents", what="it", path=("x",), at_most=0.5, bound=("y",))
    text = table([Verdict(aim=aim, measured=0.62, bound=0.6)])
    assert "| it | ≤ 0.5 | 0.620 | 0.600 | no |" in text
