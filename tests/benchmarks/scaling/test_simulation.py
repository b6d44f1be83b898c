from __future__ import annotations

import pytest

pytest.importorskip("redis")

from benchmarks.scaling.fleet import Fleet
from benchmarks.scaling.simulation import (
    hot_shards,
    peak_to_mean,
    refreshes,
    shards_of,
    spread,
)

FLEET = Fleet(num_sessions=1_000, num_instances=10, tokens=1_600, keep_alive_s=10.0)


def test_everything_is_refreshed_once_per_interval() -> None:
    per_tick = refreshes(num_sessions=40, chunks=10, interval_s=10.0)
    assert len(per_tick) == 4 * 40  # four rounds of as many ticks
    assert sum(per_tick) == pytest.approx(4 * 400, rel=0.03)


def test_refreshes_do_not_come_all_at_once() -> None:
    found = spread(FLEET)
    assert found["refreshed_per_round_share"] == pytest.approx(1.0, abs=0.03)
    assert 1.0 <= found["peak_to_mean_of_all"] < 1.5
    assert found["peak_to_mean_of_all"] <= found["peak_to_mean_of_an_instance"] < 2.0


def test_every_value_is_on_one_shard() -> None:
    counts = shards_of(range(3_000), 16)
    assert sum(counts) == 3_000
    assert min(counts) > 100


def test_many_prefixes_load_shards_more_evenly_than_one() -> None:
    found = hot_shards(FLEET, num_shards=50, num_prefixes=20)
    assert 1.0 < found["prefixes_by_zipf"] < found["one_prefix_for_all"]
    assert found["busiest_share_of_one_prefix"] < 0.1


def test_peak_to_mean() -> None:
    assert peak_to_mean([1, 1, 4]) == 2
