"""A tier's view of vLLM's real ``BlockPool``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from sam_connector.core.types import BlockId, GroupId, Zone
from sam_connector.vllm_adapter.block_pool import BlockPoolAdapter
from sam_connector.vllm_adapter.gpu_cache import GpuCache
from tests.core.builders import G0, key
from tests.core.slots import contents

pytestmark = pytest.mark.vllm

G1 = GroupId(1)


class Cache:
    """A pool, with the zoned queue or stock, and what a tier sees of it."""

    def __init__(
        self, num_blocks: int = 10, *, zoned: bool = True, reserve: float = 0.0
    ) -> None:
        self.pool = BlockPool(num_blocks + 1, True, 16)
        self.adapter = BlockPoolAdapter(self.pool) if zoned else None
        self.gpu = GpuCache(self.pool, {G0: 16, G1: 32}, reserve=reserve)

    def cache(self, text: str, group_id: GroupId = G0) -> list[Any]:
        """Blocks with content, free, the last one first in line."""
        blocks: list[Any] = self.gpu.take(len(text))
        for index, content in enumerate(contents(text, group_id)):
            self.gpu.publish(blocks[index], content, index)
        self.gpu.unpin(blocks)
        return blocks

    def claim(
        self,
        blocks: list[Any],
        zone: Zone,
        owner: Any = None,
        deadline: float = 9.0,
    ) -> None:
        assert self.adapter is not None
        queue = self.adapter.free_queue
        claim = queue.open_claim(owner, zone, deadline)
        for block in reversed(blocks):
            queue.claim(block, claim)

    def free_ids(self) -> list[int]:
        queue: Any = self.pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]


@pytest.fixture(params=[True, False], ids=["zoned", "stock"])
def cache(request: pytest.FixtureRequest) -> Cache:
    return Cache(zoned=request.param)


def test_content_is_found_by_hash_and_group(cache: Cache) -> None:
    (block,) = cache.cache("a")
    (content,), (elsewhere,) = contents("a"), contents("a", G1)
    assert [cache.gpu.find(content)] == [block]
    assert cache.gpu.find_id(*content) == BlockId(block.block_id)
    assert cache.gpu.find(elsewhere) is None
    assert cache.gpu.find_id(*elsewhere) == BlockId(0)
    assert cache.gpu.block(block.block_id) is block
    assert cache.gpu.content_of(block) == content


def test_a_reset_is_seen_at_once(cache: Cache) -> None:
    """It replaces the map of hashes."""
    cache.cache("a")
    assert cache.pool.reset_prefix_cache()
    assert cache.gpu.find(contents("a")[0]) is None


def test_a_block_holds_one_content(cache: Cache) -> None:
    (block,) = cache.cache("a")
    (content,) = contents("a")
    assert cache.gpu.holds(block, content)
    assert not cache.gpu.holds(block, contents("a", G1)[0])
    assert not cache.gpu.holds(block, contents("b")[0])
    assert not cache.gpu.holds(cache.pool.null_block, content)
    cache.pool.evict_blocks({block.block_id})
    assert not cache.gpu.holds(block, content)
    assert cache.gpu.content_of(block) is None


def test_what_is_pinned_is_not_reused(cache: Cache) -> None:
    blocks = cache.cache("abc")
    cache.gpu.pin(blocks)
    cache.gpu.pin(blocks[:1])
    assert cache.gpu.num_pins == 4
    assert cache.pool.get_num_free_blocks() == 7
    cache.pool.free_blocks(cache.pool.get_new_blocks(7))
    cache.gpu.unpin(blocks)
    assert cache.pool.get_num_free_blocks() == 9
    cache.gpu.unpin(blocks[:1])
    assert cache.gpu.num_pins == 0
    assert [cache.gpu.find(c) for c in contents("abc")] == blocks


def test_the_last_block_of_a_context_is_given_up_first(cache: Cache) -> None:
    blocks = cache.cache("abc")
    cache.gpu.pin(blocks)
    cache.gpu.unpin(blocks)
    assert cache.free_ids()[-3:] == [b.block_id for b in reversed(blocks)]


def test_taken_blocks_are_pinned_and_have_no_content(cache: Cache) -> None:
    cache.cache("abcdefghij")
    taken = cache.gpu.take(3)
    assert [cache.gpu.content_of(block) for block in taken] == [None] * 3
    assert cache.gpu.num_pins == 3
    assert cache.gpu.find(contents("abcdefghij")[9]) is None


@pytest.mark.parametrize(("group_id", "num_tokens"), [(G0, 16), (G1, 32)])
def test_a_published_block_can_be_hit(group_id: GroupId, num_tokens: int) -> None:
    """vLLM's own look-up finds it; a full block says so by its number of tokens."""
    cache = Cache(zoned=False)
    (block,) = cache.gpu.take(1)
    (content,) = contents("a", group_id)
    cache.gpu.publish(block, content, 0)
    block_hash: Any = content[1]
    assert cache.pool.get_cached_block(block_hash, [group_id]) == [block]
    cache.gpu.unpin([block])
    assert cache.pool.get_num_free_blocks() == 10
    assert block.block_hash is not None


def test_a_block_is_published_with_the_tokens_up_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache()
    said: list[Any] = []
    monkeypatch.setattr(
        cache.pool,
        "_insert_block_hash",
        lambda *args, **more: said.append(more["num_tokens"]),
    )
    blocks = cache.gpu.take(2)
    cache.gpu.publish(blocks[0], contents("abc")[2], 2)
    cache.gpu.publish(blocks[1], contents("abc", G1)[2], 2)
    assert said == [48, 96]


# --- how much may be taken --------------------------------------------------


def test_the_reserve_stays_free(cache: Cache) -> None:
    cache.gpu._reserve = 3
    assert cache.gpu.num_takeable(99) == 7
    assert cache.gpu.num_takeable(5) == 5
    cache.pool.get_new_blocks(8)
    assert cache.gpu.num_takeable(99) == 0


def test_the_reserve_is_a_share_of_the_pool() -> None:
    assert Cache(19, reserve=0.25).gpu.num_takeable(99) == 14


def test_what_a_lease_protects_is_not_taken() -> None:
    cache = Cache()
    cache.claim(cache.cache("abcd"), Zone.C)
    assert cache.gpu.num_takeable(99) == 6
    cache.claim(cache.cache("xy"), Zone.B)
    assert cache.gpu.num_takeable(99) == 6
    assert cache.gpu.num_unclaimed == 4


def test_leases_and_reserve_are_the_same_blocks_where_they_can_be() -> None:
    """What is leased is free as well, so it counts towards the reserve."""
    cache = Cache(reserve=0.5)
    cache.claim(cache.cache("abcd"), Zone.C)
    assert cache.gpu.num_takeable(99) == 5


def test_without_zones_all_free_blocks_are_unclaimed() -> None:
    cache = Cache(zoned=False)
    (block,) = cache.cache("a")
    assert cache.gpu.num_unclaimed == 10
    assert list(cache.gpu.retained()) == []
    assert list(cache.gpu.contexts_of(block)) == []


# --- who holds what ---------------------------------------------------------


def holder(session: str, context_id: int) -> Any:
    return SimpleNamespace(
        session=SimpleNamespace(key=key(session)), context_id=context_id
    )


def test_the_contexts_that_hold_a_block_are_known() -> None:
    cache = Cache()
    blocks = cache.cache("ab")
    owner = SimpleNamespace(deadlines=[holder("s", 1), holder("t", 2)])
    cache.claim(blocks, Zone.B, owner)
    assert list(cache.gpu.contexts_of(blocks[0])) == [(key("s"), 1), (key("t"), 2)]
    (other,) = cache.cache("z")
    assert list(cache.gpu.contexts_of(other)) == []
    cache.adapter.free_queue.end_claim(  # type: ignore[union-attr]
        cache.adapter.free_queue.claims[blocks[0].block_id]  # type: ignore[union-attr]
    )
    assert list(cache.gpu.contexts_of(blocks[0])) == []


def test_retained_blocks_come_in_the_order_in_which_they_are_lost() -> None:
    cache = Cache()
    leased, held = cache.cache("ab"), cache.cache("xy")
    cache.claim(leased, Zone.C)
    cache.claim(held, Zone.B)
    expected = [*reversed(held), *reversed(leased)]
    assert list(cache.gpu.retained()) == expected
    assert cache.free_ids()[-4:] == [block.block_id for block in expected]


@pytest.mark.parametrize("zone", [Zone.B, Zone.C])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_put_back_has_the_place_it_had(zone: Zone, count: int) -> None:
    cache = Cache()
    for text, deadline in (("abc", 9.0), ("xyz", 5.0)):
        cache.claim(cache.cache(text), zone, deadline=deadline)
    before = cache.free_ids()
    chosen = list(cache.gpu.retained())[:count]
    cache.gpu.pin(chosen)
    assert len(cache.free_ids()) == 10 - count
    cache.gpu.put_back(chosen)
    assert (cache.free_ids(), cache.gpu.num_pins) == (before, 0)
    assert cache.adapter is not None
    cache.adapter.free_queue.check_integrity()
    cache.gpu.pin(chosen)
    cache.gpu.unpin(chosen)  # in contrast
    cache.adapter.free_queue.check_integrity()
