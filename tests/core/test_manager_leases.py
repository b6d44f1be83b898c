"""What a lease protects, for how long, and what happens under pressure.

A context is a string, one letter a block; see ``builders``.
"""

from __future__ import annotations

from sam_connector.core.limits import Limits
from sam_connector.core.types import EditStatus
from tests.core.builders import Engine, key

# --- leases -----------------------------------------------------------------


def test_a_lease_protects_until_it_ends_and_the_session_stays_known() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.step(59)
    assert engine.pool.zone_contents()[2] == "cba"
    engine.step(2)
    assert engine.pool.zone_contents()[1:] == ("cba", "")
    assert engine.manager.stats().leases_expired == 1


def test_an_unused_session_is_forgotten_after_the_idle_time() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=100.0))
    engine.turn("s", "abc")
    engine.step(99)
    assert engine.pool.zone_contents()[1] == "cba"
    engine.step(2)
    engine.assert_nothing_left()


def test_a_running_request_keeps_its_session_known() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=10.0))
    request_id = engine.start("s", "abc", ttl=5)
    for _ in range(10):
        engine.step(7)
    assert engine.texts("s") == ["abc"]
    engine.finish(request_id)
    engine.step(20)
    engine.step(20)
    engine.assert_nothing_left()


def test_ttl_zero_ends_the_lease_and_keeps_the_claim() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.turn("s", "abc", generated="d", ttl=0)
    assert engine.deadlines("s") == {"abcd": 0.0}
    assert engine.pool.zone_contents()[1:] == ("dcba", "")


def test_no_ttl_leaves_the_lease_as_it_is() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.turn("s", "abc", generated="d")
    assert engine.deadlines("s") == {"abcd": 60.0}
    assert engine.pool.zone_contents()[2] == "dcba"


def test_a_lease_counts_from_completion() -> None:
    engine = Engine()
    request_id = engine.start("s", "abc", ttl=60)
    engine.step(30)
    engine.finish(request_id)
    assert engine.deadlines("s") == {"abc": 60.0}


def test_an_expiry_never_shortens_another_sessions_deadline() -> None:
    engine = Engine()
    engine.turn("s", "abcd", ttl=10)
    engine.turn("u", "abxy", ttl=90)
    engine.step(11)
    assert engine.holds("abcd") == [(2, 1090.0)] * 2 + [(1, 0.0)] * 2
    assert engine.pool.zone_contents()[2] == "yxba"


def test_the_end_of_a_session_leaves_what_others_hold() -> None:
    engine = Engine()
    engine.turn("s", "abcd", ttl=90)
    engine.turn("u", "abxy", ttl=10)
    engine.manager.free_session(key("s"))
    assert engine.holds("ab") == [(1, 1010.0)] * 2
    assert engine.ref_cnts("cd") == [0, 0]


def test_a_lease_can_be_extended_and_shortened_without_a_request() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=10)
    assert engine.manager.set_lease(key("s"), 100, engine.now) is EditStatus.COMPLETED
    engine.step(50)
    assert engine.pool.zone_contents()[2] == "cba"
    assert engine.manager.set_lease(key("s"), 1, engine.now) is EditStatus.COMPLETED
    engine.step(2)
    assert engine.pool.zone_contents()[2] == ""
    assert engine.manager.set_lease(key("nobody"), 1, engine.now) is None


def test_time_alone_ends_leases_with_no_engine_step_in_between() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=5.0))
    for number in range(50):
        engine.turn(f"s{number}", "a", ttl=1)
    engine.now += 3600
    engine.settle()
    assert engine.manager.stats().protected_blocks == 0
    engine.now += 3600
    engine.settle()
    engine.assert_nothing_left()


# --- pressure ---------------------------------------------------------------


def test_allocation_takes_unclaimed_then_held_then_leased_blocks() -> None:
    engine = Engine(num_blocks=11)
    engine.turn("leased", "abc", ttl=60)
    engine.turn("held", "xyz")
    engine.turn(None, "pq")
    assert engine.pool.zone_contents() == ("__qp", "zyx", "cba")
    engine.fill(8)
    assert engine.pool.free_contents() == "ba"
    stats = engine.manager.stats()
    assert (stats.claims_broken, stats.leases_broken) == (3, 1)
    engine.check_integrity()


def test_an_expired_lease_is_given_up_before_a_live_one_though_nobody_stepped() -> None:
    engine = Engine(num_blocks=9)
    engine.turn("live", "abc", ttl=60)
    engine.turn("due", "xyz", ttl=10)
    engine.fill(2)
    assert engine.pool.zone_contents() == ("", "", "cbazyx")
    engine.now += 20
    engine.fill(3)
    assert engine.pool.zone_contents()[2] == "cba"
    assert engine.manager.stats().leases_broken == 0


def test_a_forgotten_session_is_given_up_before_a_held_one() -> None:
    engine = Engine(num_blocks=7, limits=Limits(idle_ttl_s=10.0))
    engine.turn("idle", "xyz")
    engine.step(5)
    engine.turn("held", "abc")
    engine.turn("idle", "xyz")
    engine.step(5)
    engine.turn("held", "abc")
    engine.now += 6
    engine.fill(3)
    assert engine.pool.zone_contents()[1] == "cba"
    assert engine.manager.stats().claims_broken == 0


def test_protection_is_a_bias_and_never_a_lock() -> None:
    engine = Engine(num_blocks=7, limits=Limits(max_protected_fraction=1.0))
    engine.turn("s", "abcdef", ttl=3600)
    assert engine.pool.zone_contents()[0] == ""
    engine.pool.free_blocks(engine.fill(6))
    assert engine.manager.stats().leases_broken == 6
    engine.check_integrity()


def test_what_was_broken_is_protected_again_when_it_is_used_again() -> None:
    engine = Engine(num_blocks=7)
    engine.turn("s", "abc", ttl=60)
    engine.pool.free_blocks(engine.fill(6))
    assert engine.manager.stats().protected_blocks == 0
    engine.turn("s", "abc", ttl=60)
    assert engine.pool.zone_contents()[2] == "cba"


def test_the_tail_of_a_context_is_given_up_before_its_prefix() -> None:
    engine = Engine(limits=Limits(idle_ttl_s=100.0))
    # Three pieces: other sessions have been at "ab" and "abcd".
    engine.turn("s", "abcdef", ttl=10)
    engine.turn("u", "abxy", ttl=10)
    engine.turn("v", "abcdpq", ttl=10)
    engine.manager.free_session(key("u"))
    engine.manager.free_session(key("v"))
    for seconds in (0, 11, 101):
        engine.step(seconds)
        letters = [c for c in engine.pool.free_contents() if c in "abcdef"]
        assert "".join(letters) == "fedcba"
