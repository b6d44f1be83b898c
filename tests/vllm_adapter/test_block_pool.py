"""The adapter over vLLM's real ``BlockPool``."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.core.retention import BlockMetaUpdate
from sam_connector.core.types import BlockHash, BlockId, GroupId, Zone
from sam_connector.vllm_adapter.block_pool import BlockPoolAdapter

pytestmark = pytest.mark.vllm

GROUP = GroupId(0)


@pytest.fixture
def pool() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(16, True, 16)


def cached(pool: Any, *names: bytes) -> list[Any]:
    """Blocks in use that hold the content named."""
    blocks = pool.get_new_blocks(len(names))
    for position, (block, name) in enumerate(zip(blocks, names, strict=True)):
        key = name.ljust(32, b"\0") + (0).to_bytes(4, "big")
        pool._insert_block_hash(key, block, num_tokens=16 * (position + 1))
    return blocks


def digest(name: bytes) -> BlockHash:
    return BlockHash(name.ljust(32, b"\0"))


def test_the_free_list_is_taken_over_in_its_present_order(pool: Any) -> None:
    blocks = cached(pool, b"a", b"b")
    pool.free_blocks(blocks)
    before = [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]
    adapter = BlockPoolAdapter(pool)
    after = [b.block_id for b in adapter.free_queue.get_all_free_blocks()]
    assert after == before
    assert pool.null_block.block_id not in after
    assert pool.get_num_free_blocks() == adapter.num_blocks == 15
    adapter.free_queue.check_integrity()


def test_update_block_meta_guards(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    (block,) = cached(pool, b"a")
    claim = adapter.free_queue.open_claim(object(), Zone.B)

    def update(block_id: int, name: bytes, group_id: int = 0) -> BlockMetaUpdate:
        (outcome,) = adapter.update_block_meta(
            block_ids=[BlockId(block_id)],
            expected_block_hashes=[digest(name)],
            group_id=GroupId(group_id),
            claim=claim,
        )
        return outcome

    assert update(block.block_id, b"other") is BlockMetaUpdate.STALE
    assert update(block.block_id, b"a", group_id=1) is BlockMetaUpdate.STALE
    assert update(pool.null_block.block_id, b"a") is BlockMetaUpdate.REFUSED
    assert update(99, b"a") is BlockMetaUpdate.REFUSED
    assert adapter.free_queue.claims == [None] * 16
    assert update(block.block_id, b"a") is BlockMetaUpdate.UPDATED
    assert adapter.free_queue.claims[block.block_id] is claim
    assert block.ref_cnt == 1


def test_m06_content_that_changed_is_not_touched(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    (block,) = cached(pool, b"old")
    claim = adapter.free_queue.open_claim(object(), Zone.C, 9.0)
    pool.evict_blocks({block.block_id})
    pool._insert_block_hash(digest(b"new") + bytes(4), block, num_tokens=16)
    outcome = adapter.update_block_meta(
        block_ids=[BlockId(block.block_id)],
        expected_block_hashes=[digest(b"old")],
        group_id=GROUP,
        claim=claim,
    )
    assert outcome == [BlockMetaUpdate.STALE]
    assert adapter.free_queue.claims[block.block_id] is None


def test_m03_null_blocks_are_never_put_on_the_list(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    blocks = cached(pool, b"a", b"b")
    pool.free_blocks([blocks[1], pool.null_block, blocks[0]])
    adapter.free_queue.check_integrity()
    assert adapter.num_free_blocks == 15


def test_unhashed_blocks_go_before_everything_else(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    claimed, ordinary = cached(pool, b"a", b"b")
    (empty,) = pool.get_new_blocks(1)
    claim = adapter.free_queue.open_claim(object(), Zone.B)
    adapter.free_queue.claim(claimed, claim)
    pool.free_blocks([claimed, ordinary])
    pool.free_blocks([empty])
    order = adapter.free_queue.get_all_free_blocks()
    assert order[0] is empty
    assert order[-1] is claimed
    assert order[-2] is ordinary


def test_a_reset_is_seen_once(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    assert adapter.take_reset() is False
    assert pool.reset_prefix_cache()
    assert adapter.take_reset() is True
    assert adapter.take_reset() is False


def test_reuse_when_freed_spares_blocks_that_others_use(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    own, shared = cached(pool, b"a", b"b")
    pool.touch([shared])
    ids = [BlockId(block.block_id) for block in (own, shared)]
    adapter.reuse_when_freed(ids, num_own_users=1)
    pool.free_blocks([shared])
    pool.free_blocks([shared, own])
    order = adapter.free_queue.get_all_free_blocks()
    assert order[0] is own
    assert order[-1] is shared


def test_abandoned_it_is_an_ordinary_list(pool: Any) -> None:
    adapter = BlockPoolAdapter(pool)
    blocks = cached(pool, b"a", b"b")
    claim = adapter.free_queue.open_claim(object(), Zone.C, 5.0)
    for block in blocks:
        adapter.free_queue.claim(block, claim)
    pool.free_blocks(blocks)
    adapter.abandon()
    adapter.free_queue.check_integrity()
    assert adapter.free_queue.num_unclaimed == 15
    assert len(pool.get_new_blocks(15)) == 15
