from __future__ import annotations

import pytest

from sam_connector.core.retention import BlockMetaUpdate
from sam_connector.core.slot_pool import Slot, SlotPool
from sam_connector.core.types import BlockHash, BlockId, GroupId, Zone
from sam_connector.errors import IntegrityError
from tests.core.builders import G0
from tests.core.slots import contents, in_line, letters, put


def filled(num_slots: int, text: str) -> SlotPool:
    pool = SlotPool(num_slots)
    put(pool, contents(text))
    return pool


def test_a_new_pool_is_empty_and_all_of_it_can_be_had() -> None:
    pool = SlotPool(3)
    assert (pool.num_used, pool.num_pinned, pool.num_available(9)) == (0, 0, 3)
    assert [slot.index for slot in pool.allocate(3)] == [0, 1, 2]
    pool.check_integrity()


def test_content_is_found_once_it_is_published_and_not_before() -> None:
    pool = SlotPool(2)
    (slot,) = pool.allocate(1)
    (content,) = contents("a")
    assert content not in pool
    assert pool.get(content) is None
    pool.publish(slot, content)
    assert content in pool
    assert pool.get(content) is slot
    assert (pool.num_used, pool.num_pinned) == (1, 1)
    pool.check_integrity()


def test_a_group_does_not_find_what_another_one_has() -> None:
    pool = filled(2, "a")
    (other,) = contents("a", GroupId(1))
    assert other not in pool


def test_a_slot_stays_pinned_until_its_last_copy_has_ended() -> None:
    pool = filled(1, "a")
    (content,) = contents("a")
    slot = pool.get(content)
    assert slot is not None
    pool.pin([slot])
    pool.pin([slot])
    pool.unpin([slot])
    assert pool.num_available(1) == 0
    with pytest.raises(ValueError, match="cannot take"):
        pool.allocate(1)
    pool.unpin([slot])
    assert pool.num_available(1) == 1
    assert content in pool
    pool.check_integrity()


def test_a_slot_that_nothing_copies_cannot_be_unpinned() -> None:
    pool = filled(1, "a")
    with pytest.raises(AssertionError, match="slot 0 is not pinned"):
        pool.unpin([pool.blocks[1]])


def test_empty_slots_are_given_out_before_content_is_given_up() -> None:
    pool = filled(4, "ab")
    assert in_line(pool) == "__ba"
    pool.allocate(2)
    assert pool.num_displaced == 0
    pool.allocate(1)
    assert (pool.num_displaced, in_line(pool)) == (1, "a")
    assert contents("ab")[1] not in pool
    pool.check_integrity()


def test_too_many_are_refused_and_nothing_changes() -> None:
    pool = filled(3, "ab")
    with pytest.raises(ValueError, match="cannot take"):
        pool.allocate(4)
    assert in_line(pool) == "_ba"
    assert (pool.num_pinned, pool.num_displaced) == (0, 0)


def test_what_is_used_again_moves_to_the_end_of_the_line() -> None:
    pool = filled(3, "abc")
    assert in_line(pool) == "cba"
    used = [pool.blocks[3]]
    pool.pin(used)
    pool.unpin(used)
    assert in_line(pool) == "bac"


def test_a_slot_of_a_copy_that_failed_is_the_next_to_be_had() -> None:
    pool = filled(3, "ab")
    (slot,) = pool.allocate(1)
    pool.unpin([slot])
    assert in_line(pool) == "_ba"
    pool.check_integrity()


def test_of_two_copies_of_one_content_the_first_is_kept() -> None:
    pool = SlotPool(2)
    first, second = pool.allocate(2)
    (content,) = contents("a")
    pool.publish(first, content)
    pool.publish(second, content)
    pool.unpin([first, second])
    assert pool.get(content) is first
    assert letters([first, second]) == "a_"
    assert in_line(pool) == "_a"
    pool.check_integrity()


def test_only_a_slot_that_is_written_can_be_published() -> None:
    pool = filled(2, "a")
    a, b = contents("ab")
    with pytest.raises(AssertionError):
        pool.publish(pool.blocks[1], b)
    with pytest.raises(AssertionError):
        pool.publish(pool.blocks[2], b)
    assert a in pool
    assert b not in pool


def test_forgotten_content_makes_room_first() -> None:
    pool = filled(3, "abc")
    a = contents("abc")[0]
    pool.forget(a)
    pool.forget(a)
    assert a not in pool
    assert in_line(pool) == "_cb"
    pool.check_integrity()


def test_content_forgotten_while_it_is_copied_leaves_its_slot_to_the_copy() -> None:
    pool = filled(2, "a")
    slot = pool.blocks[1]
    pool.pin([slot])
    pool.forget(contents("a")[0])
    assert slot.num_pins == 1
    assert pool.num_available(2) == 1
    pool.unpin([slot])
    assert in_line(pool) == "__"
    pool.check_integrity()


def test_content_forgotten_and_stored_anew_is_not_touched_by_the_old_copy() -> None:
    pool = filled(2, "a")
    (content,) = contents("a")
    old = pool.blocks[1]
    pool.pin([old])
    pool.forget(content)
    (new,) = put(pool, [content])
    pool.unpin([old])
    assert pool.get(content) is new is not old
    pool.check_integrity()


def test_clear_forgets_all_content_and_keeps_the_pins() -> None:
    pool = filled(3, "abc")
    pinned = pool.blocks[2]
    pool.pin([pinned])
    pool.clear()
    assert (pool.num_used, pool.num_pinned) == (0, 1)
    assert list(pool.contents()) == []
    pool.check_integrity()
    pool.unpin([pinned])
    assert pool.num_available(9) == 3
    pool.check_integrity()


def test_contents_lists_what_is_there_and_missing_what_is_not() -> None:
    pool = filled(3, "ab")
    assert list(pool.contents()) == contents("ab")
    assert pool.missing(contents("abcd")) == contents("abcd")[2:]
    assert pool.missing(contents("ab")) == []


# --- claims -----------------------------------------------------------------


def claim(pool: SlotPool, text: str, zone: Zone) -> None:
    claim = pool.free_queue.open_claim(object(), zone, 9.0)
    for group_id, block_hash in contents(text):
        slot = pool.get((group_id, block_hash))
        assert slot is not None
        (update,) = pool.update_block_meta(
            block_ids=[BlockId(slot.block_id)],
            expected_block_hashes=[block_hash],
            group_id=group_id,
            claim=claim,
        )
        assert update is BlockMetaUpdate.UPDATED


@pytest.mark.parametrize("zone", [Zone.B, Zone.C])
def test_unclaimed_content_goes_before_claimed(zone: Zone) -> None:
    pool = filled(4, "abcd")
    claim(pool, "ab", zone)
    assert sorted(in_line(pool)[:2]) == ["c", "d"]
    pool.check_integrity()


@pytest.mark.parametrize(("zone", "num_available"), [(Zone.B, 5), (Zone.C, 3)])
def test_a_lease_is_not_broken_for_what_is_available(
    zone: Zone, num_available: int
) -> None:
    pool = filled(5, "ab")
    claim(pool, "ab", zone)
    assert pool.num_available(9) == num_available
    assert pool.num_available(2) == 2


def test_a_claim_on_a_slot_with_other_content_is_refused() -> None:
    pool = filled(1, "a")
    claim = pool.free_queue.open_claim(object(), Zone.B)
    for group_id, block_hash in [(G0, BlockHash(b"z")), (GroupId(1), BlockHash(b"a"))]:
        assert pool.update_block_meta(
            block_ids=[BlockId(1)],
            expected_block_hashes=[block_hash],
            group_id=group_id,
            claim=claim,
        ) == [BlockMetaUpdate.STALE]
    assert pool.free_queue.claims == [None, None]


def test_forgotten_content_is_nobodys() -> None:
    pool = filled(2, "ab")
    claim(pool, "ab", Zone.C)
    pool.forget(contents("ab")[0])
    assert pool.num_available(9) == 1
    pool.check_integrity()


def test_content_forgotten_while_it_is_copied_is_nobodys_in_the_end() -> None:
    pool = filled(1, "a")
    claim(pool, "a", Zone.C)
    pool.pin([pool.blocks[1]])
    pool.forget(contents("a")[0])
    pool.unpin([pool.blocks[1]])
    assert pool.num_available(9) == 1
    pool.check_integrity()


# --- check_integrity --------------------------------------------------------


def _pinned_on_the_list(pool: SlotPool) -> None:
    pool.blocks[1].num_pins = 1


def _not_indexed(pool: SlotPool) -> None:
    pool.blocks[2].content = contents("z")[0]


def _indexed_twice(pool: SlotPool) -> None:
    pool._slots[contents("z")[0]] = pool.blocks[1]


def _claimed_and_empty(pool: SlotPool) -> None:
    pool.free_queue.claim(pool.blocks[2], pool.free_queue.open_claim(None, Zone.B))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pinned_on_the_list, "slot 0: 1 pins"),
        (_not_indexed, "slot 1 is not indexed"),
        (_indexed_twice, "slot 0 holds something else"),
        (_claimed_and_empty, "slot 1 is claimed and empty"),
    ],
)
def test_check_integrity_sees_damage(damage: object, message: str) -> None:
    pool = filled(2, "a")
    pool.check_integrity()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_a_slot_knows_its_place_in_memory() -> None:
    assert Slot(7).index == 6
