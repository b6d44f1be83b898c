"""What a tier is told of sessions, and what it may ask of the manager."""

from __future__ import annotations

import pytest

from sam_connector.core.limits import Limits
from sam_connector.core.types import NULL_BLOCK_ID, BlockHash, BlockId, GroupId
from tests.core.builders import EVICT, G0, Engine, FakeTier, chain, evict_range, key

G1 = GroupId(1)


def context_id(engine: Engine, session: str = "s") -> int:
    (context,) = engine.contexts(session)
    return context.context_id


def lose_all(engine: Engine) -> None:
    """Strangers take the whole pool, and let go of it."""
    engine.pool.free_blocks(engine.fill(engine.pool.num_free_blocks))


def find(engine: Engine, group_id: GroupId, block_hash: BlockHash) -> BlockId:
    copies = engine.pool.cached.get((block_hash, group_id))
    return BlockId(next(iter(copies))) if copies else NULL_BLOCK_ID


def bring_back(engine: Engine, text: str, groups: tuple[GroupId, ...] = (G0,)) -> None:
    """Puts content into the prefix cache, as a prefetch does."""
    for group_id in groups:
        blocks = engine.fill(len(text))
        for block, block_hash in zip(blocks, chain(text), strict=True):
            engine.pool.cache(block, block_hash, group_id)
        engine.pool.free_blocks(blocks[::-1])


def restore(engine: Engine, session: str = "s", which: int | None = None) -> None:
    engine.manager.directory.restore(
        key(session),
        context_id(engine, session) if which is None else which,
        lambda group_id, block_hash: find(engine, group_id, block_hash),
    )
    engine.check_integrity()


# --- leases and drops -------------------------------------------------------


def test_a_tier_hears_of_every_lease() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    known = context_id(engine)
    assert tier.leases == {known: 1060.0}
    engine.manager.set_lease(key("s"), 300, engine.now)
    assert tier.leases == {known: 1300.0}
    engine.step(301)
    assert tier.leases == {known: 0.0}
    assert tier.released == []


def test_a_tier_hears_of_a_lease_that_ends_early() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    engine.turn("s", "abc", ttl=0)
    assert tier.leases == {context_id(engine): 0.0}


def test_a_tier_hears_of_a_lease_that_passes_to_another_context() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "abcdef", ttl=60)
    old = context_id(engine)
    engine.turn("s", "abcdxy")
    assert tier.leases[context_id(engine)] == 1060.0
    assert tier.released == [(key("s"), old)]


def test_a_tier_hears_of_a_context_that_was_forgotten() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier], limits=Limits(idle_ttl_s=100.0))
    engine.turn("s", "abc")
    known = context_id(engine)
    engine.step(101)
    assert tier.released == [(key("s"), known)]
    engine.assert_nothing_left()


@pytest.mark.parametrize("way", ["evict", "free", "reset"])
def test_a_tier_hears_of_a_context_that_ends(way: str) -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", ttl=60)
    known = context_id(engine)
    if way == "evict":
        engine.edit("s", EVICT)
    elif way == "free":
        engine.manager.free_session(key("s"))
    else:
        engine.reset()
    assert tier.released == [(key("s"), known)]
    engine.assert_nothing_left()


def test_a_range_that_is_given_up_ends_no_context() -> None:
    tier = FakeTier()
    engine = Engine(tiers=[tier], ranges=True)
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", evict_range(0, 2))
    assert tier.released == []


# --- contents ---------------------------------------------------------------


def test_a_tier_may_ask_what_a_context_is() -> None:
    engine = Engine(groups=(G0, G1))
    engine.turn("s", "abc", ttl=60)
    known = context_id(engine)
    lose_all(engine)  # what the context is does not depend on the engine's copy
    blocks = engine.manager.directory.contents(key("s"), known)
    assert blocks is not None
    assert blocks.block_hashes == {G0: chain("abc"), G1: chain("abc")}
    assert (blocks.context_id, blocks.deadline) == (known, 1060.0)
    assert blocks.is_whole


def test_a_context_that_is_not_known_has_no_contents() -> None:
    engine = Engine()
    engine.turn("s", "abc")
    known = context_id(engine)
    assert engine.manager.directory.contents(key("s"), known + 1) is None
    assert engine.manager.directory.contents(key("u"), known) is None
    engine.edit("s", EVICT)
    assert engine.manager.directory.contents(key("s"), known) is None


# --- restore ----------------------------------------------------------------


def test_what_was_brought_back_is_held_again() -> None:
    engine = Engine(num_blocks=17)
    engine.turn("s", "abcd", ttl=60)
    lose_all(engine)
    bring_back(engine, "abcd")
    assert engine.pool.zone_contents()[2] == ""
    restore(engine)
    assert engine.pool.zone_contents()[2] == "dcba"


def test_a_part_that_was_brought_back_is_held_and_the_rest_is_still_known() -> None:
    engine = Engine(num_blocks=17)
    engine.turn("s", "abcd")
    lose_all(engine)
    bring_back(engine, "ab")
    restore(engine)
    assert engine.pool.zone_contents()[1] == "ba"
    assert engine.texts("s") == ["abcd"]
    (result,) = engine.edit("s", EVICT)
    assert (result.blocks.done, result.blocks.missing) == (2, 2)


def test_all_groups_are_restored() -> None:
    engine = Engine(num_blocks=17, groups=(G0, G1))
    engine.turn("s", "abc")
    lose_all(engine)
    bring_back(engine, "abc", (G0, G1))
    restore(engine)
    assert engine.manager.stats().claimed_blocks == 6


def test_what_the_engine_still_has_is_not_taken_twice() -> None:
    engine = Engine()
    engine.turn("s", "abc")
    before = engine.manager.stats()
    restore(engine)
    assert engine.manager.stats() == before


def test_a_prefix_that_others_share_is_restored_for_all() -> None:
    engine = Engine(num_blocks=17)
    engine.turn("s", "abc")
    engine.turn("u", "abc")
    lose_all(engine)
    bring_back(engine, "abc")
    restore(engine)
    engine.edit("s", EVICT)
    assert engine.pool.zone_contents()[1] == "cba"
    engine.check_integrity()


def test_nothing_is_restored_for_a_context_that_is_gone() -> None:
    engine = Engine()
    engine.turn("s", "abc")
    known = context_id(engine)
    engine.edit("s", EVICT)
    restore(engine, which=known)
    restore(engine, "u", which=known)
    engine.assert_nothing_left()
