"""The store in ``/metrics``: what has changed, once in a second."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.connector.metrics import COUNTERS, UP, StoreMeter, StoreStats

pytestmark = pytest.mark.vllm


def totals(**more: int) -> dict[str, Any]:
    return {**dict.fromkeys(COUNTERS, 0), UP: 1, "other": 5, **more}


def test_what_has_changed_is_reported_once() -> None:
    meter = StoreMeter()
    first = meter.measure(totals(store_lookups=3))
    assert first is not None
    assert first.data["store_lookups"] == 3
    assert first.data[UP] == 1
    assert meter.measure(totals(store_lookups=3)) is None
    second = meter.measure(totals(store_lookups=5, store_up=0))
    assert second is not None
    assert (second.data["store_lookups"], second.data[UP]) == (2, 0)


def test_it_is_measured_once_in_a_second() -> None:
    meter = StoreMeter()
    due = [now for now in (0.0, 0.5, 0.99, 1.0, 1.5, 2.1) if meter.is_due(now)]
    assert due == [0.0, 1.0, 2.1]


def test_counters_add_up_and_the_gauge_is_the_last() -> None:
    one = StoreStats(data={"store_lookups": 2, UP: 1})
    merged = one.aggregate(StoreStats(data={"store_lookups": 3, UP: 0}))
    assert merged.reduce() == {"store_lookups": 5, UP: 0}
    assert not merged.is_empty()
    merged.reset()
    assert merged.is_empty()
