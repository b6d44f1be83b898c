"""The window follows the store."""

from __future__ import annotations

from sam_connector.pooling.back_pressure import InflightWindow


def window() -> InflightWindow:
    return InflightWindow(min_bytes=10, max_bytes=160, target_s=1.0)


def test_it_begins_wide_and_stays_so_while_the_store_is_quick() -> None:
    w = window()
    w.on_success(0.1)
    assert w.limit_bytes == 160


def test_a_slow_store_halves_it_and_a_failing_one_does() -> None:
    w = window()
    w.on_success(1.1)
    assert w.limit_bytes == 80
    w.on_failure()
    assert w.limit_bytes == 40


def test_it_never_closes_and_opens_step_by_step() -> None:
    w = window()
    for _ in range(10):
        w.on_failure()
    assert w.limit_bytes == 10
    w.on_success(0.5)
    assert w.limit_bytes == 20
    for _ in range(20):
        w.on_success(0.5)
    assert w.limit_bytes == 160
