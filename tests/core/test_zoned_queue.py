"""The zoned queue against three plain lists, and against vLLM's own queue."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sam_connector.core.types import Zone
from sam_connector.core.zoned_queue import Placement, ZonedFreeQueue
from sam_connector.errors import IntegrityError
from tests.core.pool import FakeBlock

PLACEMENTS = {
    "free": None,
    "B": Placement(Zone.B, "b"),
    "B2": Placement(Zone.B, "b2"),
    "C": Placement(Zone.C, "c"),
    # What shadow mode gives: owned, but no zone of its own.
    "A": Placement(Zone.A, "a"),
}
SEEDS = st.integers(0, 2**32 - 1)


def blocks(num_blocks: int) -> list[FakeBlock]:
    return [FakeBlock(block_id) for block_id in range(num_blocks)]


def order(queue: ZonedFreeQueue) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


class QueueMachine(RuleBasedStateMachine):
    """The model is a list per zone, in allocation order, and who is claimed how."""

    @initialize(num_blocks=st.integers(0, 12), watch_all=st.booleans())
    def build(self, num_blocks: int, watch_all: bool) -> None:
        self.blocks = blocks(num_blocks)
        self.queue = ZonedFreeQueue(self.blocks, num_blocks, watch_all=watch_all)
        self.watch_all = watch_all
        self.zones: list[list[int]] = [list(range(num_blocks)), [], []]
        self.placed: dict[int, Placement] = {}
        self.next_in_line: set[int] = set()
        self.reported: list[int] = []
        self.shortages: list[int] = []
        self.queue.on_reassigned = lambda node, placement: self.reported.append(
            node.block_id
        )
        self.queue.on_shortage = self.shortages.append

    # --- the model ---------------------------------------------------------------

    def zone_of(self, block_id: int) -> Zone:
        placement = self.placed.get(block_id)
        return Zone.A if placement is None else placement.zone

    def free(self) -> list[int]:
        return sum(self.zones, [])

    def used(self) -> list[int]:
        free = set(self.free())
        return [block.block_id for block in self.blocks if block.block_id not in free]

    def some_used(self, seed: int) -> list[int]:
        used = self.used()
        random.Random(seed).shuffle(used)
        return used[: random.Random(seed).randint(0, len(used))]

    def take(self, n: int) -> tuple[list[int], list[int]]:
        """What ``popleft_n(n)`` must return, and whom it must report."""
        free = self.free()
        taken, rest = free[:n], set(free[n:])
        self.zones = [[b for b in zone if b in rest] for zone in self.zones]
        reported = [b for b in taken if b in self.placed]
        for block_id in reported:
            del self.placed[block_id]
        return taken, reported

    # --- what vLLM calls -----------------------------------------------------------

    @rule(data=st.data())
    def popleft_n(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, len(self.free())))
        num_a = len(self.zones[Zone.A])
        # Claims in zone A, which only shadow mode makes, are watched on demand.
        if not self.watch_all and any(b in self.placed for b in self.zones[Zone.A]):
            return
        popped = [block.block_id for block in self.queue.popleft_n(n)]
        taken, reported = self.take(n)
        assert popped == taken
        assert self.reported == reported
        assert self.shortages == ([n - num_a] if n > num_a else [])

    @rule()
    def popleft(self) -> None:
        if not self.free():
            with pytest.raises(ValueError, match="No free blocks"):
                self.queue.popleft()
            return
        if self.zone_of(self.free()[0]) is Zone.A and self.free()[0] in self.placed:
            return
        block_id = self.queue.popleft().block_id
        taken, reported = self.take(1)
        assert [block_id] == taken
        assert self.reported == reported

    @rule(excess=st.integers(1, 3))
    def take_too_many(self, excess: int) -> None:
        for n in (-1, -excess, len(self.free()) + excess):
            with pytest.raises(ValueError, match="cannot take"):
                self.queue.popleft_n(n)
        assert not self.reported
        assert not self.shortages

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.free()))
        self.queue.remove(self.blocks[block_id])
        self.zones[self.zone_of(block_id)].remove(block_id)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def remove_what_is_not_there(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.used()))
        with pytest.raises(RuntimeError, match="not on the list"):
            self.queue.remove(self.blocks[block_id])

    @rule(seed=SEEDS)
    def append_n(self, seed: int) -> None:
        freed = self.some_used(seed)
        self.queue.append_n([self.blocks[block_id] for block_id in freed])
        self._appended(freed)

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.used()))
        self.queue.append(self.blocks[block_id])
        self._appended([block_id])

    def _appended(self, freed: list[int]) -> None:
        run: list[int] = []
        for block_id in freed:
            if block_id in self.next_in_line:
                run.append(block_id)
                continue
            self.zones[Zone.A][:0], run = run, []
            self.zones[self.zone_of(block_id)].append(block_id)
        self.zones[Zone.A][:0] = run
        self.next_in_line -= set(freed)

    @rule(seed=SEEDS)
    def prepend_n(self, seed: int) -> None:
        freed = self.some_used(seed)
        self.queue.prepend_n([self.blocks[block_id] for block_id in freed])
        assert self.reported == [b for b in freed if b in self.placed]
        for block_id in freed:
            self.placed.pop(block_id, None)
        self.next_in_line -= set(freed)
        self.zones[Zone.A][:0] = freed

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def iterate_after(self, data: st.DataObject) -> None:
        free = self.free()
        start = data.draw(st.integers(0, len(free)))
        cursor = self.blocks[free[start - 1]] if start else None
        after = [block.block_id for block in self.queue.iter_blocks_after(cursor)]
        assert after == free[start:]

    # --- what the owner of the claims calls -------------------------------------------

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), name=st.sampled_from(sorted(PLACEMENTS)))
    def set_placement(self, data: st.DataObject, name: str) -> None:
        block_id = data.draw(st.integers(0, len(self.blocks) - 1))
        placement = PLACEMENTS[name]
        old_zone = self.zone_of(block_id)
        is_free = block_id in self.free()
        self.queue.set_placement(self.blocks[block_id], placement)
        self.placed.pop(block_id, None)
        self.next_in_line.discard(block_id)
        if placement is not None:
            self.placed[block_id] = placement
        if is_free and self.zone_of(block_id) is not old_zone:
            self.zones[old_zone].remove(block_id)
            self.zones[self.zone_of(block_id)].append(block_id)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), when_freed=st.booleans())
    def move_to_front(self, data: st.DataObject, when_freed: bool) -> None:
        block_id = data.draw(st.integers(0, len(self.blocks) - 1))
        self.queue.next_in_line(self.blocks[block_id], when_freed=when_freed)
        self.next_in_line.discard(block_id)
        if block_id in self.free():
            self.zones[self.zone_of(block_id)].remove(block_id)
            self.zones[Zone.A].insert(0, block_id)
        elif when_freed:
            self.next_in_line.add(block_id)
        self.placed.pop(block_id, None)

    @rule()
    def unclaim_all(self) -> None:
        self.queue.unclaim_all()
        self.placed.clear()
        self.next_in_line.clear()
        self.zones = [self.free(), [], []]

    @invariant()
    def agrees(self) -> None:
        self.queue.check_integrity()
        assert order(self.queue) == self.free()
        assert self.queue.num_free_blocks == len(self.free())
        assert self.queue.num_unclaimed == len(self.zones[Zone.A])
        for block in self.blocks:
            placement = self.queue.placements[block.block_id]
            if block.block_id in self.next_in_line:
                assert placement is not None
                assert placement.owner is None
            else:
                assert placement is self.placed.get(block.block_id)
        self.reported.clear()
        self.shortages.clear()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40)


# --- identical to the queue it replaces ----------------------------------------------


def _random_operation(queues: list[Any], nodes: list[list[Any]], seed: int) -> None:
    """One call on every queue; the answers and all orders must be equal."""
    rng = random.Random(seed)
    free = [block.block_id for block in queues[0].get_all_free_blocks()]
    used = sorted(set(range(len(nodes[0]))) - set(free))
    rng.shuffle(used)
    chosen = used[: rng.randint(0, len(used))]
    name = rng.choice(
        ["popleft", "popleft_n", "remove", "append", "append_n", "prepend_n"]
    )
    if (name in ("popleft", "remove") and not free) or (name == "append" and not used):
        return
    n = rng.choice([0, min(1, len(free)), len(free), rng.randint(0, len(free))])
    target = rng.choice(free) if free else 0
    answers = []
    for queue, own in zip(queues, nodes, strict=True):
        answer: Any = None
        if name == "popleft":
            answer = queue.popleft().block_id
        elif name == "popleft_n":
            answer = [block.block_id for block in queue.popleft_n(n)]
        elif name == "remove":
            queue.remove(own[target])
        elif name == "append":
            queue.append(own[used[0]])
        else:
            getattr(queue, name)([own[block_id] for block_id in chosen])
        after = queue.iter_blocks_after(own[target] if target in free else None)
        answers.append((answer, order(queue), [b.block_id for b in after]))
    first, *others = answers
    assert all(answer == first for answer in others), name


@pytest.mark.vllm
@pytest.mark.timeout(180)  # the first import of vLLM takes a while
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 9, 64])
def test_without_a_claim_it_is_identical_to_vllms_queue(
    kv_cache_utils: ModuleType, num_blocks: int
) -> None:
    new_block = kv_cache_utils.KVCacheBlock
    nodes: list[list[Any]] = [
        [new_block(block_id) for block_id in range(num_blocks)] for _ in range(3)
    ]
    queues: list[Any] = [
        kv_cache_utils.FreeKVCacheBlockQueue(nodes[0]),
        ZonedFreeQueue(nodes[1], num_blocks),
        ZonedFreeQueue(nodes[2], num_blocks, watch_all=True),
    ]
    # Shadow mode: everything is claimed, and nothing may change.
    for block in nodes[2]:
        queues[2].set_placement(block, PLACEMENTS["A"])
    for seed in range(3000):
        _random_operation(queues, nodes, seed)
        assert queues[1].num_free_blocks == queues[0].num_free_blocks
        queues[1].check_integrity()
        queues[2].check_integrity()


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_it_has_every_public_name_of_vllms_queue(kv_cache_utils: ModuleType) -> None:
    queue = kv_cache_utils.FreeKVCacheBlockQueue([])
    stock = {name for name in dir(queue) if name[0] != "_"}
    assert stock <= set(dir(ZonedFreeQueue([], 0)))


# --- one behaviour each ----------------------------------------------------------------


def queue_with(zones: str) -> tuple[ZonedFreeQueue, list[FakeBlock]]:
    """A queue of free blocks, the n-th in the zone that the n-th letter names."""
    nodes = blocks(len(zones))
    queue = ZonedFreeQueue(nodes, len(zones))
    for block, zone in zip(nodes, zones, strict=True):
        queue.set_placement(block, PLACEMENTS["free" if zone == "A" else zone])
    return queue, nodes


def test_blocks_are_taken_from_a_then_b_then_c() -> None:
    queue, _ = queue_with("CABCAB")
    assert order(queue) == [1, 4, 2, 5, 0, 3]
    assert [block.block_id for block in queue.popleft_n(5)] == [1, 4, 2, 5, 0]


def test_the_owner_is_told_of_a_shortage_before_b_is_touched() -> None:
    queue, nodes = queue_with("AABBC")

    def expire(num_missing: int) -> None:
        assert num_missing == 1
        assert queue.num_free_blocks == 5
        queue.set_placement(nodes[4], None)

    queue.on_shortage = expire
    assert [block.block_id for block in queue.popleft_n(3)] == [0, 1, 4]
    assert queue.num_unclaimed == 0


def test_a_claim_ends_when_the_block_is_handed_out() -> None:
    queue, nodes = queue_with("BC")
    handed_out: list[tuple[int, object]] = []
    queue.on_reassigned = lambda node, placement: handed_out.append(
        (node.block_id, placement.owner)
    )
    queue.popleft_n(2)
    assert handed_out == [(0, "b"), (1, "c")]
    queue.append_n(nodes)
    assert queue.num_unclaimed == 2


def test_a_claimed_block_in_use_returns_to_its_zone() -> None:
    queue, nodes = queue_with("AAA")
    queue.remove(nodes[1])
    queue.set_placement(nodes[1], PLACEMENTS["C"])
    queue.append(nodes[1])
    assert order(queue) == [0, 2, 1]
    assert queue.num_unclaimed == 2


def test_next_in_line_moves_a_free_block_to_the_very_front() -> None:
    queue, nodes = queue_with("ABC")
    queue.next_in_line(nodes[2], when_freed=False)
    assert order(queue) == [2, 0, 1]
    assert queue.placements[2] is None


@pytest.mark.parametrize("when_freed", [False, True])
def test_next_in_line_leaves_a_block_in_use_alone(when_freed: bool) -> None:
    queue, nodes = queue_with("AAC")
    queue.remove(nodes[2])
    queue.next_in_line(nodes[2], when_freed=when_freed)
    assert order(queue) == [0, 1]
    queue.append(nodes[2])
    assert order(queue) == ([2, 0, 1] if when_freed else [0, 1, 2])


def test_a_context_freed_tail_first_and_next_in_line_keeps_that_order() -> None:
    queue, nodes = queue_with("AAAA")
    for block in nodes[1:]:
        queue.remove(block)
        queue.next_in_line(block, when_freed=True)
    queue.append_n(nodes[:0:-1])
    assert order(queue) == [3, 2, 1, 0]


def test_unclaim_all_keeps_the_order() -> None:
    queue, _ = queue_with("CABCAB")
    before = order(queue)
    queue.unclaim_all()
    queue.check_integrity()
    assert order(queue) == before
    assert queue.num_unclaimed == 6


def test_check_integrity_sees_every_kind_of_damage() -> None:
    for damage in ("back link", "zone", "count", "boundary", "placed"):
        queue, nodes = queue_with("AABBCC")
        if damage == "back link":
            nodes[3].prev_free_block = nodes[0]
        elif damage == "zone":
            queue.placements[5] = None
        elif damage == "count":
            queue.num_free_blocks += 1
        elif damage == "boundary":
            queue._first_b = nodes[3]
        else:
            queue._num_placed += 1
        with pytest.raises(IntegrityError):
            queue.check_integrity()
