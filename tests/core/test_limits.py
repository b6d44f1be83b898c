"""Every bound holds, one test per ``Limits`` field."""

from __future__ import annotations

import dataclasses

from sam_connector.core.limits import Limits
from sam_connector.core.tiers import OperationHandle
from sam_connector.core.types import EditStatus, EditType, SessionKey
from tests.core.builders import EVICT, OFFLOAD, Engine, FakeTier, evict_range, key


def test_every_limit_has_a_test() -> None:
    tested = {name.removeprefix("test_limit_") for name in globals()}
    assert {limit.name for limit in dataclasses.fields(Limits)} <= tested


def test_every_limit_is_documented() -> None:
    assert Limits.__doc__ is not None
    for limit in dataclasses.fields(Limits):
        assert f"        {limit.name}: " in Limits.__doc__


def test_limit_max_sessions() -> None:
    engine = Engine(limits=Limits(max_sessions=3))
    engine.turn("leased", "a", ttl=60)
    running = engine.start("running", "b")
    for number in range(10):
        engine.turn(f"s{number}", "abc")
    stats = engine.manager.stats()
    assert (stats.sessions, stats.sessions_dropped) == (3, 9)
    # The oldest without a lease went first, and none that is in use.
    assert engine.texts("leased") == ["a"]
    assert engine.texts("running") == ["b"]
    assert engine.texts("s9") == ["abc"]
    engine.finish(running)


def test_limit_max_sessions_with_all_of_them_in_use() -> None:
    engine = Engine(limits=Limits(max_sessions=2))
    running = [engine.start(name, "ab") for name in ("s", "t", "u")]
    stats = engine.manager.stats()
    assert (stats.sessions, stats.hints_rejected) == (2, 1)
    for request_id in running:
        engine.finish(request_id)
    engine.check_integrity()


def test_limit_max_sessions_counts_all_tenants() -> None:
    engine = Engine(limits=Limits(max_sessions=3))
    for number in range(9):
        request_id = engine.add("s", tenant=f"t{number}")
        engine.admit(request_id, "abc")
        engine.finish(request_id)
    assert engine.manager.stats().sessions == 3
    assert engine.manager.book.sessions.get(SessionKey("t8", "s")) is not None


def test_limit_max_contexts() -> None:
    engine = Engine(limits=Limits(max_contexts=3))
    for text in ("ab", "cd", "ef", "gh", "ij"):
        engine.turn("s", text, ttl=60)
    assert engine.texts("s") == ["ef", "gh", "ij"]


def test_limit_max_records() -> None:
    engine = Engine(limits=Limits(max_records=10))
    for number in range(6):
        engine.turn(f"s{number}", "abcd")
        engine.check_integrity()
    assert engine.manager.stats().records == 8
    assert engine.texts("s5") == ["abcd"]
    engine.turn("large", "abcdefghijkl")
    assert engine.manager.stats().records <= 10
    engine.check_integrity()


def test_limit_max_records_counts_what_is_held_again() -> None:
    engine = Engine(ranges=True, limits=Limits(max_records=14))
    engine.turn("s", "abcdef")
    engine.edit("s", evict_range(0, 3))
    engine.turn("t", "abcxyz")
    engine.turn("u", "abcuv")
    assert engine.manager.stats().records == 14
    running = engine.start("s", "abcdef")
    engine.check_integrity()
    assert engine.manager.stats().records <= 14
    engine.generate(running, "g")
    engine.finish(running)
    engine.check_integrity()


def test_limit_max_tree_depth() -> None:
    engine = Engine(limits=Limits(max_tree_depth=3))
    for parent, child in (("a", "b"), ("b", "c"), ("c", "d")):
        engine.turn(child, "x", parent=parent)
    assert engine.manager.stats().hints_rejected == 1
    assert engine.manager.book.tree.parent(key("d")) is None
    assert engine.texts("d") == ["x"]


def test_limit_max_edits() -> None:
    engine = Engine(limits=Limits(max_edits=2))
    engine.turn("s", "abc")
    results = engine.edit("s", EVICT, EVICT, EVICT)
    assert [result.status for result in results] == [EditStatus.REJECTED] * 3
    assert engine.texts("s") == ["abc"]
    first, second = engine.edit("s", EVICT, EVICT)
    assert first.status is EditStatus.COMPLETED
    assert second.status is EditStatus.NOT_FOUND


def test_limit_max_operations() -> None:
    tier = FakeTier(EditType.OFFLOAD)
    engine = Engine(tiers=[tier], limits=Limits(max_operations=3))
    engine.turn("s", "abc", ttl=60)
    for _ in range(8):
        engine.edit("s", OFFLOAD)
    edits = engine.manager.edits
    assert len(edits.operations) == 3
    assert len(edits.operations.open_of(key("s"))) == 3
    # The end of an operation that was forgotten is no surprise.
    for operation_id in tier.operation_ids:
        tier.finish(operation_id, EditStatus.COMPLETED)
    engine.step()
    assert len(edits.operations) == 3
    assert edits.operations.open_of(key("s")) == []


def test_limit_max_ttl_s() -> None:
    engine = Engine(limits=Limits(max_ttl_s=100.0))
    engine.turn("s", "abc", ttl=1e18)
    assert engine.deadlines("s") == {"abc": 100.0}
    engine.manager.set_lease(key("s"), float("inf"), engine.now)
    assert engine.deadlines("s") == {"abc": 100.0}


def test_limit_idle_ttl_s() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=0.0))
    running = engine.start("s", "abc")
    for _ in range(3):
        engine.step(1)
    assert engine.texts("s") == ["abc"]
    engine.finish(running)
    engine.step(2)
    engine.assert_nothing_left()


def test_limit_max_protected_fraction() -> None:
    engine = Engine(num_blocks=20, limits=Limits(max_protected_fraction=0.25))
    engine.turn("s", "abc", ttl=60)
    engine.turn("t", "xyz", ttl=60)
    engine.check_integrity()
    stats = engine.manager.stats()
    assert stats.protected_blocks == 3
    assert stats.leases_refused > 0
    # All of a context or nothing, and what was refused is held all the same.
    assert engine.deadlines("t") == {"xyz": 0.0}
    assert engine.pool.zone_contents()[1:] == ("zyx", "cba")


def test_limit_max_protected_fraction_of_a_lease_renewed_when_all_is_used_up() -> None:
    engine = Engine(num_blocks=20, limits=Limits(max_protected_fraction=0.25))
    engine.turn("s", "abc", ttl=60)
    engine.turn("t", "xyz", ttl=60)
    engine.manager.set_lease(key("s"), 90, engine.now)
    assert engine.deadlines("s") == {"abc": 90.0}
    assert engine.manager.set_lease(key("t"), 90, engine.now) is EditStatus.REJECTED
    engine.manager.set_lease(key("s"), 0, engine.now)
    assert engine.manager.set_lease(key("t"), 90, engine.now) is EditStatus.COMPLETED
    assert engine.pool.zone_contents()[1:] == ("cba", "zyx")


def test_limit_max_protected_fraction_with_blocks_released_in_between() -> None:
    engine = Engine(
        num_blocks=20, ranges=True, limits=Limits(max_protected_fraction=0.25)
    )
    engine.turn("u", "abc")
    engine.turn("s", "abcde", ttl=60)
    engine.edit("s", evict_range(0, 3))
    engine.turn("t", "xyz", ttl=60)
    assert engine.manager.stats().protected_blocks == 5
    engine.turn("s", "abcde", generated="f")
    engine.check_integrity()


def test_limit_max_protected_fraction_keeps_what_protect_blocks_says() -> None:
    engine = Engine(
        num_blocks=20, ranges=True, limits=Limits(max_protected_fraction=0.25)
    )
    engine.turn("s", "abcd", ttl=60, protect=2)
    engine.turn("t", "xyz", ttl=60)
    engine.turn("s", "abcd", generated="e")
    assert [deadline > 0 for _, deadline in engine.holds("abcde")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_limit_max_expiries_per_step() -> None:
    engine = Engine(limits=Limits(max_expiries_per_step=2, idle_ttl_s=5.0))
    for number in range(5):
        engine.turn(f"s{number}", "a")
    engine.step(10)
    assert engine.manager.stats().sessions == 3
    engine.step()
    engine.step()
    engine.assert_nothing_left()


def test_contexts_that_were_offloaded_count_towards_the_records() -> None:
    """They hold no block of the engine, and are remembered all the same."""
    tier = FakeTier(EditType.OFFLOAD)
    tier.answer = OperationHandle(status=EditStatus.COMPLETED, is_safe=True)
    engine = Engine(tiers=[tier], limits=Limits(max_records=8))
    for number in range(6):
        engine.turn(f"s{number}", f"{number}ab")
        engine.edit(f"s{number}", OFFLOAD)
    assert engine.manager.stats().records == 0
    assert engine.manager.book.index.num_blocks <= 8
    assert engine.manager.stats().sessions_dropped > 0
    engine.check_integrity()
