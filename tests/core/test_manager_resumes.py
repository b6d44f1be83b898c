"""What ``expected_resume_s`` changes: who goes first among those kept alike.

A context is a string, one letter a block; see ``builders``.
"""

from __future__ import annotations

import random

import pytest

from sam_connector.core.limits import Limits
from sam_connector.core.types import EditStatus
from tests.core.builders import EVICT, Engine, FakeTier, key

# --- the order ----------------------------------------------------------------


def test_under_leases_who_is_back_latest_goes_first() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=60, resume=10)
    engine.turn("t", "xy", ttl=60, resume=30)
    engine.turn("u", "pq", ttl=60, resume=20)
    assert engine.pool.zone_contents()[2] == "yxqpba"


def test_under_a_lease_the_deadline_stands_for_what_nobody_has_said() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=100, resume=30)
    engine.turn("t", "xy", ttl=50)
    engine.turn("u", "pq", ttl=20)
    assert engine.pool.zone_contents()[2] == "yxbaqp"


def test_a_client_that_comes_back_after_its_lease_goes_before_others() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=50, resume=500)
    engine.turn("t", "xy", ttl=100)
    assert engine.pool.zone_contents()[2] == "bayx"


def test_without_a_lease_who_has_said_when_goes_after_the_others() -> None:
    engine = Engine()
    engine.turn("s", "ab", resume=10)
    engine.turn("t", "xy", resume=30)
    engine.turn("u", "pq")
    engine.turn("v", "mn")
    assert engine.pool.zone_contents()[1:] == ("qpnmyxba", "")


def test_an_expectation_is_no_lease() -> None:
    engine = Engine()
    engine.turn("s", "ab", resume=3600)
    engine.turn("t", "xy", ttl=5)
    assert engine.pool.zone_contents()[1:] == ("ba", "yx")
    assert engine.manager.stats().protected_blocks == 2
    assert engine.deadlines("s") == {"ab": 0.0}


def test_a_lease_that_ends_leaves_the_expectation_its_place_in_b() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=5, resume=100)
    engine.step(10)
    engine.turn("t", "xy")
    assert engine.pool.zone_contents()[1:] == ("yxba", "")


def test_it_counts_from_the_end_of_the_answer() -> None:
    engine = Engine()
    request_id = engine.start("s", "ab", ttl=60, resume=20)
    engine.step(30)
    engine.finish(request_id)
    (context,) = engine.contexts("s")
    assert context.resume_at == engine.now + 20


def test_it_is_capped_like_a_lease() -> None:
    engine = Engine(limits=Limits(max_ttl_s=50.0))
    engine.turn("s", "ab", resume=3600)
    engine.manager.set_lease(key("s"), 0, engine.now, expected_resume_s=3600)
    (context,) = engine.contexts("s")
    assert context.resume_at == engine.now + 50


def test_without_the_field_nothing_is_in_the_wheel() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=60)
    engine.turn("t", "abc")
    assert len(engine.manager.book.leases.resumes) == 0
    assert all(s.expectations is None for s in engine.manager.book.index.segments())


# --- how it ends ----------------------------------------------------------------


def test_overdue_is_the_same_as_not_expected() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=100, resume=10)
    engine.turn("t", "xy", ttl=50)
    engine.turn("u", "pq", resume=10)
    engine.turn("v", "mn")
    assert engine.pool.zone_contents()[1:] == ("nmqp", "yxba")
    engine.step(12)
    assert engine.pool.zone_contents()[1:] == ("nmqp", "bayx")
    engine.turn("v", "mn")
    assert engine.pool.zone_contents()[1:] == ("qpnm", "bayx")
    assert engine.contexts("s")[0].deadline == 1100.0


def test_what_is_overdue_is_noticed_before_blocks_are_taken() -> None:
    """No step has come since: a shortage is reason enough to look."""
    engine = Engine(num_blocks=5)
    engine.turn("s", "ab", ttl=100, resume=10)
    engine.turn("t", "xy", ttl=50, resume=20)
    assert engine.pool.zone_contents()[2] == "yxba"
    engine.now += 30
    engine.fill(1)
    assert engine.pool.zone_contents()[2] == "ayx"


def test_coming_back_ends_the_expectation() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=60, resume=10)
    request_id = engine.start("s", "abc")
    (context,) = engine.contexts("s")
    assert context.resume_at == 0.0
    engine.finish(request_id)
    assert context.resume_at == 0.0
    assert len(engine.manager.book.leases.resumes) == 0


def test_a_request_that_is_cut_short_says_nothing() -> None:
    engine = Engine()
    engine.turn("s", "ab", resume=10, aborted=True)
    (context,) = engine.contexts("s")
    assert context.resume_at == 0.0


def test_a_side_call_does_not_end_what_is_said_of_the_conversation() -> None:
    engine = Engine()
    engine.turn("s", "abcd", ttl=60, resume=10)
    engine.turn("s", "xy")
    assert [c.resume_at > 0 for c in engine.contexts("s")] == [True, False]


@pytest.mark.parametrize("end", ["evict", "free", "idle", "reset"])
def test_nothing_is_left_of_an_expectation(end: str) -> None:
    engine = Engine(limits=Limits(idle_ttl_s=20.0))
    engine.turn("s", "ab", ttl=5, resume=3000)
    if end == "evict":
        engine.edit("s", EVICT)
    elif end == "free":
        engine.manager.free_session(key("s"))
    elif end == "reset":
        assert engine.reset()
    else:
        engine.step(10)
        engine.step(30)
    assert len(engine.manager.book.leases.resumes) == 0
    engine.assert_nothing_left()


def test_many_that_are_overdue_at_once_are_seen_to_in_several_steps() -> None:
    engine = Engine(limits=Limits(max_expiries_per_step=2))
    for number in range(5):
        engine.turn(f"s{number}", chr(ord("a") + number), resume=10)
    left = []
    engine.now += 60
    for _ in range(3):
        assert engine.manager.advance(engine.now) == (len(left) < 2)
        left.append(len(engine.manager.book.leases.resumes))
    assert left == [3, 1, 0]


# --- shared segments --------------------------------------------------------------


def test_a_shared_prefix_is_due_with_the_first_of_its_sessions() -> None:
    engine = Engine()
    engine.turn("s", "abx", ttl=60, resume=40)
    engine.turn("t", "aby", ttl=60, resume=20)
    engine.turn("u", "p", ttl=60, resume=30)
    assert engine.pool.zone_contents()[2] == "xpyba"
    engine.step(22)
    assert engine.pool.zone_contents()[2] == "yxbap"


def test_what_one_session_says_puts_no_other_behind() -> None:
    """The other has a lease and has said nothing: it may be back until that ends."""
    engine = Engine()
    engine.turn("s", "abx", ttl=60)
    engine.turn("t", "aby", resume=3000)
    engine.turn("u", "p", ttl=600)
    assert engine.pool.zone_contents()[1:] == ("y", "pxba")


def test_a_split_keeps_what_is_expected() -> None:
    engine = Engine()
    engine.turn("s", "abcd", ttl=60, resume=40)
    engine.turn("t", "abxy", ttl=60, resume=50)
    engine.turn("u", "p", ttl=60, resume=45)
    assert engine.pool.zone_contents()[2] == "yxpdcba"
    engine.check_integrity()


def test_a_prefix_of_very_many_sessions_loses_them_one_by_one() -> None:
    engine = Engine(num_blocks=300)
    for number in range(200):
        text = "ab" + chr(1000 + number)
        engine.turn(f"s{number}", text, ttl=3000, resume=1 + number * 31 % 200)
    for _ in range(20):
        engine.step(11)
        engine.check_integrity()
    assert len(engine.manager.book.leases.resumes) == 0
    assert all(s.expectations is None for s in engine.manager.book.index.segments())


# --- without a request ------------------------------------------------------------


def test_it_can_be_said_with_a_lease() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=60)
    engine.turn("t", "xy", ttl=60)
    engine.step(5)
    status = engine.manager.set_lease(key("s"), 60, engine.now, expected_resume_s=50)
    assert status is EditStatus.COMPLETED
    assert engine.pool.zone_contents()[2] == "yxba"
    (context,) = engine.contexts("s")
    assert context.resume_at == engine.now + 50


def test_a_lease_without_it_leaves_what_was_said() -> None:
    engine = Engine()
    engine.turn("s", "ab", ttl=60, resume=50)
    (context,) = engine.contexts("s")
    said = context.resume_at
    engine.manager.set_lease(key("s"), 30, engine.now)
    assert context.resume_at == said
    engine.manager.set_lease(key("s"), 0, engine.now)
    assert context.resume_at == said


def test_it_can_be_said_where_a_lease_ends() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.turn("t", "abx", ttl=0)
    engine.manager.set_lease(key("s"), 0, engine.now, expected_resume_s=50)
    engine.turn("u", "p")
    assert engine.pool.zone_contents()[1:] == ("xpcba", "")


# --- tiers ------------------------------------------------------------------------


def test_tiers_hear_of_every_change() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "ab", ttl=60, resume=50)
    (context,) = engine.contexts("s")
    assert tier.resumes == {context.context_id: context.resume_at}
    assert engine.manager.book.blocks_of(context).resume_at == context.resume_at
    engine.step(60)
    assert tier.resumes == {context.context_id: 0.0}


# --- nothing else changes -----------------------------------------------------------


def test_a_word_that_everybody_gives_alike_changes_no_order_under_leases() -> None:
    """With the same lease for all, due back alike is the order of today."""
    limits = Limits(max_protected_fraction=1.0)
    engines = [Engine(num_blocks=30, limits=limits) for _ in range(2)]
    rng = random.Random(7)
    for _ in range(200):
        session = rng.choice("stuv")
        text = session + "abcdefg"[: rng.randint(1, 7)]
        for engine, resume in zip(engines, (None, 60), strict=True):
            engine.turn(session, text, ttl=60, resume=resume)
        first, second = (engine.pool.free_contents() for engine in engines)
        assert first == second
