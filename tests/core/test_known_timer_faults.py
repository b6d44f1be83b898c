"""Faults with timers and clocks that others had in public: group N.

The rest is in ``test_known_faults``.
"""

from __future__ import annotations

import math
import time

import pytest

from sam_connector.core.limits import Limits
from sam_connector.core.timer_wheel import TimerWheel
from sam_connector.core.types import EditStatus, EditType
from tests.core.builders import EVICT, G0, PREFETCH, Engine, FakeTier, key
from tests.core.test_known_faults import imports_of_the_core

# --- N: timers and clocks ---------------------------------------------------


@pytest.mark.parametrize("ttl", [1e-9, 0.999, 1, 3599.999, 3600, True])
def test_n01_a_lease_ends_within_a_tick_of_its_ttl(ttl: float) -> None:
    engine = Engine(now=1000.25)
    engine.turn("s", "abc", ttl=ttl)
    engine.now += ttl - min(ttl, 1e-6)
    engine.step()
    assert engine.manager.stats().leases_expired == 0
    engine.step(1.0 + 1e-6)
    assert engine.manager.stats().leases_expired == 1


@pytest.mark.parametrize("ttl", [3600.0001, 1e18, math.inf])
def test_n01_a_ttl_beyond_the_bound_is_the_bound(ttl: float) -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=ttl)
    assert engine.deadlines("s") == {"abc": 3600.0}
    engine.step(3599)
    assert engine.manager.stats().leases_expired == 0
    engine.step(1)
    assert engine.manager.stats().leases_expired == 1
    for _ in range(10):
        engine.step(1)
    assert engine.manager.stats().leases_expired == 1


@pytest.mark.parametrize("ttl", [0, -1, -1e18, math.nan, -math.inf])
def test_n01_a_ttl_that_is_none_protects_nothing_and_never_reaches_the_wheel(
    ttl: float,
) -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=ttl)
    engine.manager.set_lease(key("s"), ttl, engine.now)
    assert engine.deadlines("s") == {"abc": 0.0}
    assert engine.manager.stats().leases_granted == 0
    assert engine.pool.zone_contents()[1:] == ("cba", "")
    engine.check_integrity()


def test_n03_a_day_of_renewals_every_ten_seconds_stays_exact() -> None:
    wheel: TimerWheel[str] = TimerWheel(now=0.0)
    wheel.register("renewed", 30.0)
    wheel.register("probe 0", 25.0)
    due = 25.0
    for now in range(1, 86_401):
        if now % 10 == 0:
            wheel.register("renewed", now + 30.0)
        for fired in wheel.advance(float(now), 100):
            assert fired.startswith("probe")
            assert due <= now <= due + 1
            due = now + 25.5
            wheel.register(f"probe {now}", due)
    wheel.check_integrity()
    assert len(wheel) == 2


def test_n04_a_deadline_beyond_the_wheel_does_not_fire_early() -> None:
    wheel: TimerWheel[int] = TimerWheel(num_slots=8)
    for ticks in range(8, 101):
        wheel.register(ticks, float(ticks))
    for now in range(1, 102):
        assert wheel.advance(float(now), 100) == ([now] if 8 <= now <= 100 else [])


def test_n06_a_timer_re_armed_while_it_fires_does_not_fire_again_at_once() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    for name in ("a", "b", "c"):
        wheel.register(name, 5.0)
    fired: list[str] = []
    for _ in range(20):
        for name in wheel.advance(5.0, limit=1):
            fired.append(name)
            # With a deadline that has passed, while the slot is half drained.
            wheel.register(name, 5.0)
    assert fired == ["a", "b", "c"]
    assert sorted(wheel.advance(6.0, 100)) == ["a", "b", "c"]


def test_n06_a_timer_removed_by_another_of_its_slot_is_not_lost_or_doubled() -> None:
    wheel: TimerWheel[str] = TimerWheel()
    for name in ("a", "b", "c", "d"):
        wheel.register(name, 5.0)
    (first,) = wheel.advance(5.0, limit=1)
    assert wheel.remove("c")
    assert not wheel.remove(first)
    assert wheel.advance(5.0, 100) == ["b", "d"]
    assert wheel.advance(1e6, 100) == []


def test_n06_a_running_context_whose_idle_time_is_over_is_re_armed_once() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=3.0, max_expiries_per_step=1))
    running = [engine.start(f"s{number}", "abc") for number in range(4)]
    for _ in range(50):
        engine.step(1)
    assert engine.manager.stats().timers == 4
    for request_id in running:
        engine.finish(request_id)
    for _ in range(12):
        engine.step(1)
    engine.assert_nothing_left()


def test_n07_a_jump_of_the_wall_clock_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    for jump in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1e9 + jump)
        engine.step(1)
        assert engine.pool.zone_contents()[2] == "cba"
    engine.step(60)
    assert engine.manager.stats().leases_expired == 1


def test_n07_the_core_reads_no_clock() -> None:
    for name, imported in imports_of_the_core().items():
        assert "datetime" not in imported, name
        assert "time" not in imported or name == "clock.py"


@pytest.mark.parametrize("path", ["step", "settle", "edit", "lease", "pressure"])
def test_n09_every_path_sees_that_a_lease_is_over(path: str) -> None:
    engine = Engine(num_blocks=9)
    engine.turn("s", "abc", ttl=10)
    engine.turn("u", "xyz", ttl=100)
    engine.now += 11
    if path == "step":
        engine.step()
    elif path == "settle":
        engine.settle()
    elif path == "edit":
        engine.edit("nobody", EVICT)
    elif path == "lease":
        engine.manager.set_lease(key("nobody"), 5, engine.now)
    else:
        engine.fill(3)
    assert engine.deadlines("s") == {"abc": 0.0}
    assert engine.pool.zone_contents()[2] == "zyx"


def test_n10_an_evict_during_a_prefetch_reaches_the_tier_and_its_end_is_harmless() -> (
    None
):
    tier = FakeTier(EditType.PREFETCH, EditType.EVICT)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=10)
    (prefetch,) = engine.edit("s", PREFETCH)
    (evict,) = engine.edit("s", EVICT)
    assert evict.status is EditStatus.COMPLETED
    assert [call[0] for call in tier.calls] == ["register_cache", "prefetch", "evict"]
    assert prefetch.operation_id is not None
    tier.finish(prefetch.operation_id, EditStatus.PARTIAL)
    engine.step()
    known = engine.manager.edits.operations.get(prefetch.operation_id)
    assert known is not None
    assert known[1].status is EditStatus.PARTIAL
    engine.assert_nothing_left()


def test_n10_the_end_of_a_lease_touches_no_block_in_use() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=10)
    reader = engine.start(None, "abc")
    engine.step(11)
    engine.edit("s", EVICT)
    engine.pool.free_blocks(engine.fill(engine.pool.num_free_blocks))
    blocks = engine.runs[reader].blocks[G0]
    assert engine.pool.contents(blocks) == "abc"
    assert {block.ref_cnt for block in blocks} == {1}
    engine.finish(reader)
    engine.check_integrity()
