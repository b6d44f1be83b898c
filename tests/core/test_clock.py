from __future__ import annotations

import time

import pytest

from sam_connector.core.clock import ManualClock, MonotonicClock


def test_the_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert (clock.now(), clock.now()) == (5.0, 5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5
    clock.set(7.5)
    assert clock.now() == 7.5


def test_the_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    with pytest.raises(ValueError, match="cannot go"):
        clock.set(4.0)
    with pytest.raises(ValueError, match="cannot go"):
        clock.advance(-1.0)
    assert clock.now() == 5.0


def test_the_real_clock_is_not_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MonotonicClock()
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.now() < before + 3600
