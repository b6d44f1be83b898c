from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.core_ops.agents import Agents, Block, Replay, Script
from sam_connector.core.zoned_queue import ZonedFreeQueue

NUM_BLOCKS = 4_500


def calls(script: Script) -> Counter[str]:
    return Counter(name for _, found in script.stretches for name, _ in found)


def replay(script: Script, other: Script) -> ZonedFreeQueue:
    blocks = [Block(block_id) for block_id in range(NUM_BLOCKS + 1)]
    queue = ZonedFreeQueue(blocks[1:], NUM_BLOCKS + 1)
    player = Replay(queue, blocks)
    for each in (script, other):
        for _, bound in player.prepare(each):
            for call, argument in bound:
                call(argument)
    return queue


@pytest.mark.parametrize("claimed", [False, True])
def test_a_replayed_queue_ends_in_the_same_order(claimed: bool) -> None:
    agents = Agents(NUM_BLOCKS, claimed=claimed)
    queue = replay(agents.fill(), agents.play(10))
    agents.check_integrity()
    queue.check_integrity()
    played = agents._queue.get_all_free_blocks()
    assert [b.block_id for b in played] == [
        b.block_id for b in queue.get_all_free_blocks()
    ]
    assert len(played) == NUM_BLOCKS


def test_mix_has_all_that_a_block_pool_asks_for() -> None:
    agents = Agents(NUM_BLOCKS, claimed=False)
    agents.fill()
    found = calls(agents.play(20))
    assert set(found) == {"popleft_n", "remove", "append_n", "prepend_n"}
    # One of each for every request, and hits in spite of the pressure.
    assert found["append_n"] == found["prepend_n"] == 20 * 8
    assert found["remove"] > 20 * 8


def test_blocks_that_change_hands_are_counted() -> None:
    agents = Agents(NUM_BLOCKS, claimed=False)
    script = agents.play(3)
    moved = 0
    for _, found in script.stretches:
        for name, argument in found:
            match name:
                case "popleft_n":
                    moved += argument
                case "remove":
                    moved += 1
                case _:
                    moved += len(argument)
    assert script.num_blocks == moved


def test_claims_are_kept_up_apart_from_the_queue() -> None:
    agents = Agents(NUM_BLOCKS, claimed=True)
    agents.fill()
    script = agents.play(20)
    for is_claim, found in script.stretches:
        names = {name for name, _ in found}
        assert names <= (
            {"open_claim", "claim_all", "move_claim", "end_claim"}
            if is_claim
            else {"popleft_n", "remove", "append_n", "prepend_n"}
        )
    assert calls(script)["move_claim"] == 20 * 8
    assert agents._queue.num_unclaimed < NUM_BLOCKS / 2


def test_a_context_is_hit_up_to_its_first_missing_block() -> None:
    agents = Agents(NUM_BLOCKS, claimed=False)
    agents.fill()
    for _ in range(10):
        agents.play(1)
        free = {block.block_id for block in agents._queue.get_all_free_blocks()}
        chains = [agent.chain for agent in agents._agents]
        cached = [block_id for chain in chains for block_id in chain]
        assert len(cached) == len(set(cached))
        assert set(cached) <= free
        assert any(len(a.chain) < a.length for a in agents._agents)
