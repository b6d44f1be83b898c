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
    meter.measure(totals(store_up=1))
    asked = (0.0, 0.5, 0.99, 1.0, 1.5, 2.1)
    assert [x for x in asked if meter.is_due(x, is_up=True)] == [0.0, 1.0, 2.1]


def test_a_store_that_goes_or_comes_back_is_measured_at_once() -> None:
    meter = StoreMeter()
    assert meter.is_due(0.0, is_up=True)
    meter.measure(totals(store_up=1))
    assert meter.is_due(0.1, is_up=False)
    meter.measure(totals(store_up=0))
    assert not meter.is_due(0.2, is_up=False)
    assert meter.is_due(0.3, is_up=True)


def test_counters_add_up_and_the_gauge_is_the_last() -> None:
    one = StoreStats(data={"store_lookups": 2, UP: 1})
    merged = one.aggregate(StoreStats(data={"store_lookups": 3, UP: 0}))
    assert merged.reduce() == {"store_lookups": 5, UP: 0}
    assert not merged.is_empty()
    merged.reset()
    assert merged.is_empty()
