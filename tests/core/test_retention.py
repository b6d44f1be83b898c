"""Resident copies, the guarded door, and zones of segments."""

from __future__ import annotations

import pytest

from sam_connector.core.retention import BlockMetaUpdate
from sam_connector.core.types import BlockId, Zone
from sam_connector.errors import IntegrityError
from tests.core.builders import EVICT, G0, Engine, Run, chain, evict_range, key


def test_only_a_block_that_holds_the_content_becomes_its_copy() -> None:
    engine = Engine()
    stranger = engine.start(None, "abc")
    engine.pool.uncache(engine.runs[stranger].blocks[G0][1])
    request_id = engine.add("s", ttl=60)
    engine.runs[request_id] = Run("abc", engine.runs[stranger].blocks)
    engine.manager.on_blocks_assigned(request_id, engine.chains(request_id), engine.now)
    assert engine.ref_cnts("abc") == [1, 1, 1]
    assert engine.manager.stats().claimed_blocks == 2
    engine.check_integrity()
    engine.finish(request_id)
    assert engine.manager.stats().protected_blocks == 2


def test_the_null_block_and_foreign_ids_are_refused() -> None:
    engine = Engine()
    claim = engine.pool.free_queue.open_claim("x", Zone.C, 5.0)
    updates = engine.pool.update_block_meta(
        block_ids=[BlockId(0), BlockId(-1), BlockId(engine.num_blocks)],
        expected_block_hashes=chain("abc"),
        group_id=G0,
        claim=claim,
    )
    assert updates == [BlockMetaUpdate.REFUSED] * 3


def test_a_context_with_null_blocks_is_held_without_a_copy_of_them() -> None:
    """A sliding window leaves null blocks at the start of the table."""
    engine = Engine()
    request_id = engine.add("s", ttl=60)
    engine.admit(request_id, "abcd")
    blocks = engine.runs[request_id].blocks[G0]
    windowed = Run("abcd", {G0: [engine.pool.blocks[0]] * 2 + blocks[2:]})
    other = engine.add("u", ttl=60)
    engine.runs[other] = windowed
    engine.manager.on_blocks_assigned(other, engine.chains(other), engine.now)
    engine.check_integrity()
    assert engine.ref_cnts("abcd") == [2] * 4
    engine.manager.free_session(key("s"))
    engine.check_integrity()


def test_the_first_copy_is_kept_where_there_are_two() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    first = engine.pool.lookup(chain("abc"), G0)
    request_id = engine.add("s", ttl=60)
    copies = engine.pool.get_new_blocks(3)
    for block, block_hash in zip(copies, chain("abc"), strict=True):
        engine.pool.cache(block, block_hash, G0)
    engine.runs[request_id] = Run("abc", {G0: copies})
    engine.manager.on_blocks_assigned(request_id, engine.chains(request_id), engine.now)
    engine.finish(request_id)
    assert engine.manager.stats().protected_blocks == 3
    queue = engine.pool.free_queue
    assert {queue.claims[block.block_id] for block in copies} == {None}
    assert None not in {queue.claims[block.block_id] for block in first}


def test_a_copy_that_was_lost_is_replaced_by_the_next_request() -> None:
    engine = Engine(num_blocks=7)
    engine.turn("s", "abc", ttl=60)
    engine.pool.free_blocks(engine.fill(5))
    assert engine.manager.stats().protected_blocks == 1
    engine.turn("s", "abc")
    assert engine.manager.stats().protected_blocks == 3


def test_a_block_of_a_given_up_context_is_taken_over_with_its_content() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", EVICT)
    engine.turn("u", "abc", ttl=60)
    assert engine.holds("abc") == [(1, 1060.0)] * 3
    assert engine.pool.zone_contents()[2] == "cba"


def test_content_lost_behind_our_back_is_forgotten_when_the_block_is_freed() -> None:
    engine = Engine()
    running = engine.start("s", "abc", ttl=60)
    for block in engine.runs[running].blocks[G0]:
        engine.pool.uncache(block)
    engine.finish(running)
    assert engine.manager.stats().claimed_blocks == 0
    assert engine.pool.free_queue.num_unclaimed == engine.num_blocks - 1
    engine.check_integrity()


def test_blocks_given_up_and_lost_at_once_can_be_used_again() -> None:
    engine = Engine(ranges=True)
    engine.turn("s", "abcdef", ttl=60)
    running = engine.start("s", "abcdef")
    engine.edit("s", evict_range(0, 3))
    for block in engine.runs[running].blocks[G0][:3]:
        engine.pool.uncache(block)
    engine.finish(running)
    engine.turn("s", "abcdef", ttl=60)
    engine.check_integrity()
    assert engine.manager.stats().claimed_blocks == 6
    assert engine.pool.zone_contents()[2] == "fedcba"


def test_a_prefix_that_sessions_shared_is_not_first_in_line_when_the_last_ends() -> (
    None
):
    engine = Engine(num_blocks=9)
    engine.turn("s", "abcd", ttl=60)
    engine.turn("u", "abxy", ttl=60)
    engine.edit("s", EVICT)
    engine.edit("u", EVICT)
    assert engine.pool.free_contents() == "yxdc__ba"


def test_a_fork_keeps_order_and_protection() -> None:
    engine = Engine(num_blocks=17)
    engine.turn("s", "abcdef", ttl=60)
    before = engine.pool.free_contents()
    for text in ("abcdex", "abx", "abcx", "x"):
        running = engine.start("u", text)
        engine.check_integrity()
        engine.manager.free_session(key("u"))
        engine.pool.free_blocks(
            [b for b in engine.runs[running].blocks[G0] if b.block_id > 0][::-1]
        )
        engine.runs[running].blocks = {}
        engine.finish(running)
    engine.check_integrity()
    assert engine.pool.zone_contents()[2] == "fedcba"
    assert before.endswith("fedcba")


def test_check_integrity_sees_every_kind_of_damage() -> None:
    def wrong_count(engine: Engine) -> None:
        engine.manager._retention.num_claimed += 1

    def wrong_zone(engine: Engine) -> None:
        next(engine.manager.book.index.segments()).zone = Zone.B

    def lost_claim(engine: Engine) -> None:
        engine.pool.free_queue.claims = [None] * engine.num_blocks

    def wrong_resident(engine: Engine) -> None:
        segment = next(engine.manager.book.index.segments())
        segment.block_ids[0] = segment.block_ids[1]

    for damage in (wrong_count, wrong_zone, lost_claim, wrong_resident):
        engine = Engine()
        engine.turn("s", "abc", ttl=60)
        damage(engine)
        with pytest.raises(IntegrityError):
            engine.manager.check_integrity()
