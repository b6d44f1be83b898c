"""What a lease protects, for how long, and what happens under pressure.

A context is a string, one letter a block; see ``builders``.
"""

from __future__ import annotations

import pytest

from sam_connector.core.limits import Limits
from sam_connector.core.types import EditStatus
from tests.core.builders import EVICT, Engine, key

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


# --- the protected share ----------------------------------------------------


def small_share(num_blocks: int = 24, *, ranges: bool = False) -> Engine:
    """An engine in which five blocks may be protected."""
    limits = Limits(max_protected_fraction=5.5 / num_blocks)
    return Engine(num_blocks=num_blocks, limits=limits, ranges=ranges)


def test_running_requests_do_not_use_up_the_protected_share() -> None:
    engine = small_share()
    running = [engine.start(name, name * 4, ttl=60) for name in "pqr"]
    assert engine.manager.stats().protected_blocks == 0
    engine.turn("s", "abcde", ttl=60)
    stats = engine.manager.stats()
    assert (stats.protected_blocks, stats.leases_refused) == (5, 0)
    assert engine.deadlines("s") == {"abcde": 60.0}
    # All of them have what they asked for as long as they run, and it grows.
    engine.generate(running[0], "x")
    engine.preempt(running[1])
    engine.admit(running[1], "qqqq")
    assert [engine.deadlines(name) for name in "pqr"] == [
        {name * 4: 60.0} for name in "pqr"
    ]
    engine.check_integrity()
    for request_id in running:
        engine.finish(request_id, aborted=True)
        engine.check_integrity()
    assert engine.manager.stats().leases_refused == 3
    assert engine.pool.zone_contents()[2] == "edcba"


def test_a_context_whose_request_runs_again_makes_room_meanwhile() -> None:
    engine = small_share()
    engine.turn("s", "abcd", ttl=60)
    running = engine.start("s", "abcd")
    assert engine.manager.stats().protected_blocks == 0
    engine.turn("t", "xyz", ttl=60)
    engine.finish(running)
    # Who comes to rest first is protected, not who was leased first.
    assert engine.deadlines("s") == {"abcd": 0.0}
    assert engine.deadlines("t") == {"xyz": 60.0}
    assert engine.pool.zone_contents()[1:] == ("dcba", "zyx")


@pytest.mark.parametrize("aborted", [False, True])
def test_a_lease_without_room_ends_with_the_last_request_of_its_context(
    aborted: bool,
) -> None:
    engine = small_share()
    engine.turn("t", "xyz", ttl=60)
    request_id = engine.start("s", "ab", ttl=60)
    assert engine.deadlines("s") == {"ab": 60.0}
    engine.generate(request_id, "cd")
    engine.finish(request_id, aborted=aborted)
    engine.check_integrity()
    # The whole context, though its first two blocks would have fitted.
    assert engine.deadlines("s") == {"abcd": 0.0}
    assert engine.holds("abcd") == [(1, 0.0)] * 4
    assert engine.pool.zone_contents()[1:] == ("dcba", "zyx")
    stats = engine.manager.stats()
    assert (stats.protected_blocks, stats.leases_refused) == (3, 1)
    assert stats.leases_expired == 0


def test_a_lease_from_before_ends_too_if_its_context_outgrew_the_share() -> None:
    engine = small_share()
    engine.turn("s", "abcd", ttl=60)
    engine.turn("s", "abcd", generated="ef")
    assert engine.deadlines("s") == {"abcdef": 0.0}
    assert engine.pool.zone_contents()[1:] == ("fedcba", "")
    engine.check_integrity()
    # What others protect does not count against a context that shares it.
    engine.turn("t", "xyz", ttl=60)
    engine.turn("u", "xyzpq", ttl=60)
    assert engine.deadlines("u") == {"xyzpq": 60.0}
    assert engine.manager.stats().protected_blocks == 5


def test_a_context_is_as_large_as_what_is_resident_of_it() -> None:
    engine = small_share(num_blocks=9)
    engine.turn("s", "abcde", ttl=60)
    engine.pool.free_blocks(engine.fill(6))
    stats = engine.manager.stats()
    assert (stats.protected_blocks, stats.leases_broken) == (2, 3)
    engine.turn("t", "xyz", ttl=60)
    assert engine.deadlines("t") == {"xyz": 60.0}
    assert engine.manager.stats().protected_blocks == 5
    engine.check_integrity()


def test_of_two_requests_of_a_context_only_the_last_decides() -> None:
    engine = small_share()
    first = engine.start("s", "abc", ttl=60)
    second = engine.start("s", "abc", ttl=60)
    engine.turn("t", "xyz", ttl=60)
    engine.finish(first)
    stats = engine.manager.stats()
    assert (stats.protected_blocks, stats.leases_refused) == (3, 0)
    assert engine.deadlines("s") == {"abc": 60.0}
    engine.finish(second)
    assert engine.manager.stats().leases_refused == 1
    assert engine.deadlines("s") == {"abc": 0.0}
    assert engine.pool.zone_contents()[1:] == ("cba", "zyx")


def test_the_last_request_decides_for_a_context_it_does_not_own() -> None:
    engine = small_share()
    older = engine.start("s", "abc", ttl=60)
    newer = engine.start("s", "abc", ttl=60)
    engine.turn("t", "xyz", ttl=60)
    engine.generate(newer, "d")
    engine.finish(newer)
    assert engine.deadlines("s") == {"abcd": 60.0}
    engine.finish(older)
    assert engine.deadlines("s") == {"abcd": 0.0}
    assert engine.pool.zone_contents()[1:] == ("dcba", "zyx")
    engine.check_integrity()


def test_room_that_is_made_before_the_last_request_ends_counts() -> None:
    engine = small_share()
    engine.turn("t", "xyz", ttl=60)
    request_id = engine.start("s", "abc", ttl=60)
    engine.edit("t", EVICT)
    engine.finish(request_id)
    assert engine.deadlines("s") == {"abc": 60.0}
    assert engine.manager.stats().leases_refused == 0


def test_a_rewind_takes_the_place_of_what_it_replaces_in_the_share_too() -> None:
    engine = small_share()
    engine.turn("s", "abcde", ttl=60)
    engine.turn("s", "abcdx")
    assert engine.deadlines("s") == {"abcdx": 60.0}
    assert engine.manager.stats().protected_blocks == 5
    assert engine.pool.zone_contents()[2] == "xdcba"


def test_evict_in_the_hint_leaves_no_lease_to_decide_about() -> None:
    engine = small_share()
    engine.turn("t", "xyz", ttl=60)
    engine.turn("s", "abcd", ttl=60, edits=[EVICT])
    assert engine.manager.stats().leases_refused == 0
    assert engine.texts("s") == []
    engine.check_integrity()


def test_a_lease_put_on_a_session_at_rest_is_checked() -> None:
    engine = small_share()
    engine.turn("t", "xyz", ttl=60)
    engine.turn("s", "abc")
    engine.turn("s", "pq")
    assert engine.manager.set_lease(key("s"), 30, engine.now) is EditStatus.PARTIAL
    assert engine.deadlines("s") == {"abc": 0.0, "pq": 30.0}
    engine.manager.set_lease(key("s"), 0, engine.now)
    assert engine.manager.set_lease(key("t"), 90, engine.now) is EditStatus.COMPLETED
    engine.turn("u", "mn", ttl=60)
    assert engine.manager.set_lease(key("s"), 30, engine.now) is EditStatus.REJECTED
    stats = engine.manager.stats()
    assert (stats.protected_blocks, stats.leases_refused) == (5, 3)
    engine.check_integrity()


def test_a_lease_put_on_a_session_that_runs_is_checked_when_it_comes_to_rest() -> None:
    engine = small_share()
    engine.turn("t", "xyz", ttl=60)
    running = engine.start("s", "abc")
    assert engine.manager.set_lease(key("s"), 30, engine.now) is EditStatus.COMPLETED
    assert engine.deadlines("s") == {"abc": 30.0}
    assert engine.manager.stats().protected_blocks == 3
    engine.finish(running)
    assert engine.deadlines("s") == {"abc": 0.0}
    assert engine.manager.stats().leases_refused == 1


def test_only_what_protect_blocks_covers_needs_room() -> None:
    engine = small_share(ranges=True)
    engine.turn("t", "xyz", ttl=60)
    engine.turn("s", "abcdefg", ttl=60, protect=2)
    assert engine.deadlines("s") == {"abcdefg": 60.0}
    assert engine.pool.zone_contents()[1:] == ("gfedc", "zyxba")
    assert engine.manager.stats().protected_blocks == 5


def test_a_context_that_grew_without_a_lease_needs_room_for_its_prefix_only() -> None:
    engine = small_share(ranges=True)
    engine.turn("s", "ab", ttl=60, protect=4)
    engine.manager.set_lease(key("s"), 0, engine.now)
    engine.turn("s", "ab", generated="cdefgh")
    assert engine.manager.set_lease(key("s"), 60, engine.now) is EditStatus.COMPLETED
    assert engine.manager.stats().protected_blocks == 4
    assert engine.pool.zone_contents()[1:] == ("hgfe", "dcba")
    engine.check_integrity()
