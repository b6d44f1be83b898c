from __future__ import annotations

import pytest

from sam_connector.core.slot_pool import SlotPool
from sam_connector.core.tier_contexts import TierContexts
from sam_connector.core.types import GroupId
from sam_connector.errors import IntegrityError
from tests.core.builders import G0, key
from tests.core.slots import blocks_of, contents, in_line, put

S, T = key("s"), key("t")
BOTH = (G0, GroupId(1))


def tier(text: str, num_slots: int = 12, max_protected: int = 12) -> TierContexts:
    """A tier that has the blocks of a context, held by nobody."""
    pool = SlotPool(num_slots)
    put(pool, contents(text))
    return TierContexts(pool, max_protected=max_protected)


def pool_of(contexts: TierContexts) -> SlotPool:
    return contexts._pool


def leased(contexts: TierContexts) -> int:
    """Slots that cannot be had without breaking a lease."""
    pool = pool_of(contexts)
    return pool.num_slots - pool.num_pinned - pool.num_available(pool.num_slots)


def test_a_context_holds_what_the_tier_has_of_it() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abcde"))
    assert (contexts.num_held(S), contexts.num_claimed, len(contexts)) == (3, 3, 1)
    assert contexts.num_held(T) == 0
    contexts.check_integrity()


def test_what_comes_later_is_held_as_well() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abcde"))
    put(pool_of(contexts), contents("abcde")[3:])
    contexts.keep(S, blocks_of("abcde"))
    assert contexts.num_held(S) == 5
    assert len(contexts) == 1
    contexts.check_integrity()


def test_a_hole_is_filled_when_its_content_comes_back() -> None:
    contexts = tier("")
    put(pool_of(contexts), [contents("abc")[0], contents("abc")[2]])
    contexts.keep(S, blocks_of("abc"))
    put(pool_of(contexts), [contents("abc")[1]])
    contexts.keep(S, blocks_of("abc"))
    assert contexts.num_held(S) == 3


def test_held_content_is_given_up_after_ordinary_and_before_leased() -> None:
    contexts = tier("ab", num_slots=6)
    put(pool_of(contexts), contents("xy"))
    put(pool_of(contexts), contents("mn"))
    contexts.keep(S, blocks_of("ab"))
    contexts.keep(T, blocks_of("xy", 2, deadline=9.0))
    assert in_line(pool_of(contexts)) == "nmbayx"


def test_a_context_may_hold_blocks_of_several_groups() -> None:
    contexts = tier("ab")
    put(pool_of(contexts), contents("abc", GroupId(1)))
    contexts.keep(S, blocks_of("abc", groups=BOTH))
    assert contexts.num_held(S) == 5
    contexts.release(S, 1)
    assert contexts.num_claimed == 0


def test_a_shared_prefix_is_held_until_the_last_session_lets_go() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc", 1))
    contexts.keep(T, blocks_of("ab", 2))
    assert contexts.num_claimed == 3
    contexts.release(S, 1)
    assert (contexts.num_claimed, contexts.num_held(T)) == (2, 2)
    contexts.release(T, 2)
    assert (contexts.num_claimed, len(contexts)) == (0, 0)
    contexts.check_integrity()


def test_a_session_has_as_many_contexts_as_it_keeps() -> None:
    contexts = tier("abc")
    put(pool_of(contexts), contents("xy"))
    contexts.keep(S, blocks_of("abc", 1))
    contexts.keep(S, blocks_of("xy", 2))
    assert (len(contexts), contexts.num_held(S)) == (2, 5)
    contexts.release(S, 1)
    assert (len(contexts), contexts.num_held(S)) == (1, 2)
    contexts.check_integrity()


def test_to_release_what_is_not_known_changes_nothing() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc"))
    contexts.release(T, 1)
    contexts.release(S, 2)
    contexts.release_range(T, 1, 0, 9)
    contexts.set_lease(T, 1, 9.0)
    assert (contexts.num_held(S), leased(contexts)) == (3, 0)


@pytest.mark.parametrize(("front", "order"), [(False, "yxcba"), (True, "cbayx")])
def test_released_content_is_given_up_last_or_first(front: bool, order: str) -> None:
    contexts = tier("abc", num_slots=5)
    put(pool_of(contexts), contents("xy"))
    contexts.keep(S, blocks_of("abc"))
    contexts.release(S, 1, front=front)
    assert in_line(pool_of(contexts)) == order


def test_contexts_of_one_session_are_not_taken_for_several_sessions() -> None:
    """What several sessions had is not put in front: the next may use it."""
    contexts = tier("abc", num_slots=5)
    put(pool_of(contexts), contents("xy"))
    for session, order in ((S, "cbayx"), (T, "yxcba")):
        contexts.keep(S, blocks_of("abc", 1))
        contexts.keep(session, blocks_of("abc", 2))
        contexts.release(S, 1, front=True)
        contexts.release(session, 2, front=True)
        assert in_line(pool_of(contexts)) == order
        assert contexts._contexts == {}
        pool_of(contexts).unpin(pool_of(contexts).allocate(0))
        for slot in list(pool_of(contexts).free_queue.get_all_free_blocks()):
            if slot.content in contents("xy"):
                pool_of(contexts).pin([slot])
                pool_of(contexts).unpin([slot])


def test_a_range_is_released_alone() -> None:
    contexts = tier("abcdef")
    contexts.keep(S, blocks_of("abcdef", deadline=9.0))
    contexts.release_range(S, 1, 2, 4)
    assert (contexts.num_held(S), leased(contexts)) == (4, 4)
    assert sorted(in_line(pool_of(contexts)).replace("_", "")[:2]) == ["c", "d"]
    contexts.check_integrity()
    contexts.keep(S, blocks_of("abcdef", deadline=9.0))
    assert contexts.num_held(S) == 6


# --- leases -----------------------------------------------------------------


def test_a_lease_begins_and_ends() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc"))
    assert leased(contexts) == 0
    contexts.set_lease(S, 1, 9.0)
    assert leased(contexts) == 3
    contexts.set_lease(S, 1, 0.0)
    assert (leased(contexts), contexts.num_held(S)) == (0, 3)
    contexts.check_integrity()


def test_what_is_stored_for_a_leased_context_is_leased() -> None:
    contexts = tier("ab")
    contexts.keep(S, blocks_of("abc", deadline=9.0))
    put(pool_of(contexts), contents("abc")[2:])
    contexts.keep(S, blocks_of("abc", deadline=9.0))
    assert leased(contexts) == 3


def test_a_context_kept_after_its_lease_has_ended_has_none() -> None:
    contexts = tier("ab")
    contexts.keep(S, blocks_of("ab", deadline=9.0))
    contexts.keep(S, blocks_of("ab"))
    assert leased(contexts) == 0
    contexts.check_integrity()


def test_a_shared_prefix_is_leased_as_long_as_anybody_leases_it() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc", 1, deadline=9.0))
    contexts.keep(T, blocks_of("ab", 2, deadline=5.0))
    contexts.set_lease(S, 1, 0.0)
    assert leased(contexts) == 2
    contexts.release(T, 2)
    assert leased(contexts) == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_lease_for_which_the_share_has_no_room_is_refused_whole(late: bool) -> None:
    contexts = tier("abc", max_protected=4)
    put(pool_of(contexts), contents("xy"))
    contexts.keep(S, blocks_of("abc", 1, deadline=9.0))
    contexts.keep(T, blocks_of("xy", 2, deadline=0.0 if late else 9.0))
    contexts.set_lease(T, 2, 9.0)
    assert (leased(contexts), contexts.num_held(T)) == (3, 2)
    contexts.release(S, 1)
    contexts.set_lease(T, 2, 9.0)
    assert leased(contexts) == 2


def test_a_leased_context_that_outgrows_the_share_is_held_without_a_lease() -> None:
    """All of it is protected or nothing, and none of it is anybody's prey."""
    contexts = tier("abc", max_protected=4)
    contexts.keep(S, blocks_of("abc", deadline=9.0))
    put(pool_of(contexts), contents("abcdef")[3:])
    contexts.keep(S, blocks_of("abcdef", deadline=9.0))
    assert (leased(contexts), contexts.num_held(S)) == (0, 6)
    contexts.check_integrity()


def test_nobody_holds_anything_after_a_clear() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc", deadline=9.0))
    contexts.clear()
    pool_of(contexts).clear()
    assert (len(contexts), contexts.num_claimed, contexts.num_held(S)) == (0, 0, 0)
    contexts.check_integrity()
    pool_of(contexts).check_integrity()
    contexts.release(S, 1)
    put(pool_of(contexts), contents("abc"))
    contexts.keep(S, blocks_of("abc"))
    assert contexts.num_held(S) == 3


def test_displaced_content_is_held_no_longer() -> None:
    contexts = tier("abc", num_slots=3)
    contexts.keep(S, blocks_of("abc"))
    pool_of(contexts).allocate(2)
    assert (contexts.num_held(S), contexts.num_claimed) == (1, 1)
    contexts.check_integrity()


def test_forgotten_content_is_held_no_longer() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc"))
    pool_of(contexts).forget(contents("abc")[1])
    assert (contexts.num_held(S), contexts.num_claimed) == (2, 2)
    contexts.check_integrity()


def test_content_forgotten_while_it_is_copied_and_stored_anew_is_held() -> None:
    contexts = tier("a")
    pool = pool_of(contexts)
    contexts.keep(S, blocks_of("a", deadline=9.0))
    old = pool.get(contents("a")[0])
    assert old is not None
    pool.pin([old])
    pool.forget(contents("a")[0])
    assert contexts.num_held(S) == 0
    put(pool, contents("a"))
    contexts.keep(S, blocks_of("a", deadline=9.0))
    pool.unpin([old])
    assert (contexts.num_held(S), leased(contexts)) == (1, 1)
    contexts.check_integrity()


def test_check_integrity_sees_a_context_that_is_not_in_the_tree() -> None:
    contexts = tier("abc")
    contexts.keep(S, blocks_of("abc"))
    del contexts._contexts[S]
    with pytest.raises(IntegrityError):
        contexts.check_integrity()


def test_who_is_expected_back_latest_is_given_up_first() -> None:
    contexts = tier("")
    pool = pool_of(contexts)
    for session, text, resume_at in ((S, "ab", 10.0), (T, "xy", 30.0)):
        put(pool, contents(text))
        contexts.keep(session, blocks_of(text, 1, 50.0, resume_at=resume_at))
    assert in_line(pool)[-4:] == "yxba"
    contexts.set_resume(S, 1, 40.0)
    assert in_line(pool)[-4:] == "bayx"
    contexts.set_resume(S, 1, 0.0)
    contexts.set_resume(T, 1, 0.0)
    contexts.set_resume(T, 7, 1.0)  # not followed here
    contexts.check_integrity()


def test_what_is_kept_again_is_expected_as_said_last() -> None:
    contexts = tier("abxy")
    contexts.keep(S, blocks_of("ab", 1, resume_at=20.0))
    contexts.keep(S, blocks_of("ab", 1, resume_at=0.0))
    contexts.check_integrity()
    assert not pool_of(contexts).free_queue._expected.claims
