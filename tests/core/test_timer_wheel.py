"""The timer wheel against a dictionary of deadlines."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from sam_connector.core.timer_wheel import TimerWheel
from sam_connector.errors import IntegrityError

KEYS = st.integers(0, 7)


def drain(wheel: TimerWheel[str], now: float) -> list[str]:
    return wheel.advance(now, limit=1_000_000)


class WheelMachine(RuleBasedStateMachine):
    """Every key is in ``due``: key to the tick at which it must fire."""

    @initialize(
        num_slots=st.sampled_from([1, 2, 8, 60]),
        tick_s=st.sampled_from([0.25, 1.0, 7.0]),
        start=st.sampled_from([0.0, 12.5, 1_000_003.0]),
    )
    def build(self, num_slots: int, tick_s: float, start: float) -> None:
        self.wheel: TimerWheel[int] = TimerWheel(
            num_slots=num_slots, tick_s=tick_s, now=start
        )
        self.tick_s = tick_s
        self.now = start
        self.latest = start
        self.deadlines: dict[int, float] = {}
        self.registered_at: dict[int, float] = {}

    @rule(key=KEYS, delay=st.floats(-5, 200, allow_nan=False))
    def register(self, key: int, delay: float) -> None:
        self.wheel.register(key, self.now + delay)
        self.deadlines[key] = self.now + delay
        self.registered_at[key] = self.latest

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.wheel.remove(key) == (key in self.deadlines)
        self.deadlines.pop(key, None)

    @rule(seconds=st.floats(0, 500, allow_nan=False))
    def time_passes(self, seconds: float) -> None:
        """Without anybody advancing the wheel: a scheduler that is busy."""
        self.now += seconds

    @rule(limit=st.sampled_from([1, 2, 100]))
    def advance(self, limit: int) -> None:
        self.latest = self.now
        fired = self.wheel.advance(self.now, limit)
        assert len(fired) == len(set(fired)) <= limit
        for key in fired:
            assert self.deadlines.pop(key) <= self.now, "fired early"
            del self.registered_at[key]
        if len(fired) < limit:
            overdue = {
                key
                for key, deadline in self.deadlines.items()
                # One tick late at most; re-armed in the past, from the next tick on.
                if max(deadline, self.registered_at[key]) + self.tick_s <= self.now
            }
            assert not overdue

    @invariant()
    def agrees(self) -> None:
        self.wheel.check_integrity()
        assert len(self.wheel) == len(self.deadlines)
        assert all(key in self.wheel for key in self.deadlines)


TestWheelMachine = WheelMachine.TestCase
TestWheelMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_key_fires_within_one_tick_of_its_deadline() -> None:
    for ttl in (1e-9, 0.999, 1.0, 299.5, 3599.999, 3600.0):
        wheel: TimerWheel[str] = TimerWheel(now=1000.25)
        wheel.register("k", 1000.25 + ttl)
        fired_at = next(
            now
            for now in (1000.25 + step / 4 for step in range(15_000))
            if drain(wheel, now)
        )
        assert 1000.25 + ttl <= fired_at <= 1000.25 + ttl + 1.25


def test_refreshing_a_key_replaces_its_deadline() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    wheel.register("k", 5.0)
    wheel.register("k", 9.0)
    assert len(wheel) == 1
    assert drain(wheel, 8.0) == []
    assert drain(wheel, 9.0) == ["k"]


def test_a_deadline_can_be_brought_forward() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    wheel.register("k", 500.0)
    wheel.register("k", 3.0)
    assert drain(wheel, 3.0) == ["k"]
    assert drain(wheel, 1000.0) == []


def test_time_going_back_is_ignored() -> None:
    wheel: TimerWheel[str] = TimerWheel(now=100.0)
    wheel.register("k", 105.0)
    assert drain(wheel, 3.0) == []
    assert drain(wheel, 105.0) == ["k"]


def test_a_long_absence_costs_one_round_and_loses_nothing() -> None:
    wheel: TimerWheel[str] = TimerWheel(num_slots=8)
    for number in range(40):
        wheel.register(str(number), number + 1.0)
    assert sorted(drain(wheel, 1e9)) == sorted(map(str, range(40)))
    wheel.register("later", 1e9 + 3)
    assert drain(wheel, 1e9 + 2) == []
    assert drain(wheel, 1e9 + 3) == ["later"]


def test_the_limit_bounds_one_call_and_the_rest_follows() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    for number in range(10):
        wheel.register(str(number), 2.0 + number % 2)
    fired = [wheel.advance(5.0, limit=3) for _ in range(5)]
    assert [len(keys) for keys in fired] == [3, 3, 3, 1, 0]
    assert sorted(key for keys in fired for key in keys) == [
        str(number) for number in range(10)
    ]


def test_the_earliest_deadlines_come_first() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    for deadline in (30, 10, 20):
        wheel.register(str(deadline), deadline)
    assert drain(wheel, 100.0) == ["10", "20", "30"]


@pytest.mark.parametrize("deadline", [math.nan, math.inf, -math.inf])
def test_a_deadline_that_is_no_number_is_refused_and_changes_nothing(
    deadline: float,
) -> None:
    wheel: TimerWheel[str] = TimerWheel()
    wheel.register("k", 5.0)
    with pytest.raises(ValueError, match="finite"):
        wheel.register("k", deadline)
    assert drain(wheel, 5.0) == ["k"]


@pytest.mark.parametrize(("num_slots", "tick_s"), [(0, 1.0), (8, 0.0), (8, math.nan)])
def test_an_impossible_wheel_is_refused(num_slots: int, tick_s: float) -> None:
    with pytest.raises(ValueError, match="bad wheel"):
        TimerWheel(num_slots=num_slots, tick_s=tick_s)


def test_check_integrity_sees_a_misfiled_key() -> None:
    wheel: TimerWheel[str] = TimerWheel(num_slots=8)
    wheel.register("k", 5.0)
    wheel._slots[6]["k"] = wheel._slots[5].pop("k")
    with pytest.raises(IntegrityError, match="misfiled"):
        wheel.check_integrity()
    wheel._slots[6].clear()
    with pytest.raises(IntegrityError, match="disagree"):
        wheel.check_integrity()
