"""The zoned queue against plain lists, at random and after every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
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

from sam_connector.core.claim import Claim
from sam_connector.core.types import Zone
from sam_connector.core.zoned_queue import ZonedFreeQueue
from tests.core.pool import FakeBlock

SEEDS = st.integers(0, 2**32 - 1)
PLACES = st.sampled_from(
    [
        (Zone.B, 0.0),
        (Zone.B, 0.0),
        (Zone.B, 10.0),
        (Zone.B, 20.0),
        (Zone.C, 10.0),
        (Zone.C, 20.0),
        (Zone.C, 30.0),
    ]
)


def make_blocks(num_blocks: int) -> list[FakeBlock]:
    return [FakeBlock(block_id) for block_id in range(num_blocks)]


def order(queue: Any) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


@dataclass(eq=False)
class ModelClaim:
    """A claim: what is under it, and its free blocks in order."""

    claim: Claim
    zone: Zone
    due_at: float
    blocks: set[int] = field(default_factory=set)
    run: list[int] = field(default_factory=list)

    @property
    def place(self) -> tuple[bool, float]:
        """By last use first, then by time."""
        return self.zone is Zone.C or self.due_at > 0, -self.due_at


class QueueMachine(RuleBasedStateMachine):
    """Zone A is a list of blocks; B and C are lists of claims with a run."""

    @initialize(num_blocks=st.integers(0, 14), enforce=st.sampled_from([1, 1, 1, 0]))
    def build(self, num_blocks: int, enforce: int) -> None:
        self.enforce = bool(enforce)
        self.blocks = make_blocks(num_blocks)
        self.queue = ZonedFreeQueue(self.blocks, num_blocks, enforce=self.enforce)
        self.a = list(range(num_blocks))
        self.b: list[ModelClaim] = []
        self.c: list[ModelClaim] = []
        self.claims: list[ModelClaim] = []
        self.next_in_line: set[int] = set()
        self.reported: list[int] = []
        self.shortages: list[int] = []
        self.queue.on_reassigned = self.on_reassigned
        self.num_reassigned = 0
        self.queue.on_shortage = self.shortages.append

    def on_reassigned(self, blocks: Sequence[Any], claim: Claim) -> None:
        owners = {self.claim_of(block.block_id) for block in blocks}
        assert [owner and owner.claim for owner in owners] == [claim]
        self.reported += [block.block_id for block in blocks]
        self.num_reassigned += len(blocks)

    # --- the model -----------------------------------------------------------

    def free(self) -> list[int]:
        return self.a + [b for claim in [*self.b, *self.c] for b in claim.run]

    def used(self) -> list[int]:
        free = set(self.free())
        return [block.block_id for block in self.blocks if block.block_id not in free]

    def some_used(self, seed: int) -> list[int]:
        rng, used = random.Random(seed), self.used()
        rng.shuffle(used)
        chosen = used[: rng.randint(0, len(used))]
        # Mostly a claim's blocks come together, as a context's do.
        if rng.random() < 0.7:
            chosen.sort(key=lambda b: id(self.claim_of(b)))
        return chosen

    def claim_of(self, block_id: int) -> ModelClaim | None:
        return next((c for c in self.claims if block_id in c.blocks), None)

    def unlink(self, block_id: int) -> None:
        claim = self.claim_of(block_id)
        if claim is None or block_id not in claim.run:
            self.a.remove(block_id)
            return
        claim.run.remove(block_id)
        if not claim.run:
            (self.b if claim.zone is Zone.B else self.c).remove(claim)

    def link(self, claim: ModelClaim, run: list[int]) -> None:
        """Appends to a claim's run, and puts the run where it belongs."""
        zone = self.b if claim.zone is Zone.B else self.c
        is_timed, _ = claim.place
        if claim in zone and not is_timed:
            zone.remove(claim)
        if claim not in zone:
            zone.append(claim)
            zone.sort(key=lambda c: c.place)
        claim.run += run

    def extract(self, claim: ModelClaim) -> list[int]:
        run, claim.run = claim.run, []
        if run:
            (self.b if claim.zone is Zone.B else self.c).remove(claim)
        return run

    def append_all(self, freed: list[int]) -> None:
        while freed:
            claim, marked = self.claim_of(freed[0]), freed[0] in self.next_in_line
            length = 0
            while length < len(freed) and (
                self.claim_of(freed[length]) is claim
                and (freed[length] in self.next_in_line) == marked
            ):
                length += 1
            chain, freed = freed[:length], freed[length:]
            if marked:
                self.a[:0] = chain
                self.next_in_line -= set(chain)
            elif claim is None or not self.enforce:
                self.a += chain
            else:
                self.link(claim, chain)

    def forget(self, block_ids: list[int]) -> list[int]:
        """Takes blocks out of their claims; returns those that had one."""
        claimed = []
        for block_id in block_ids:
            self.next_in_line.discard(block_id)
            claim = self.claim_of(block_id)
            if claim is not None:
                claim.blocks.discard(block_id)
                claimed.append(block_id)
        return claimed

    # --- what vLLM calls -----------------------------------------------------

    @rule(seed=SEEDS)
    def popleft_n(self, seed: int) -> None:
        n = random.Random(seed).randint(0, len(self.free()))
        num_a = len(self.a)
        taken = self.free()[:n]
        popped = [block.block_id for block in self.queue.popleft_n(n)]
        self._taken(taken)
        assert popped == taken
        assert self.shortages == ([n - num_a] if n > num_a else [])

    @rule()
    def popleft(self) -> None:
        if not self.free():
            with pytest.raises(ValueError, match="No free blocks"):
                self.queue.popleft()
            return
        taken = self.free()[:1]
        popped = self.queue.popleft().block_id
        self._taken(taken)
        assert [popped] == taken

    def _taken(self, taken: list[int]) -> None:
        for block_id in taken:
            self.unlink(block_id)
        assert self.reported == self.forget(taken)

    @rule(excess=st.integers(1, 3))
    def take_too_many(self, excess: int) -> None:
        for n in (-1, -excess, len(self.free()) + excess):
            with pytest.raises(ValueError, match="cannot take"):
                self.queue.popleft_n(n)
        assert not self.reported
        assert not self.shortages

    @precondition(lambda self: self.free())
    @rule(seed=SEEDS)
    def remove(self, seed: int) -> None:
        block_id = random.Random(seed).choice(self.free())
        self.queue.remove(self.blocks[block_id])
        self.unlink(block_id)

    @precondition(lambda self: self.used())
    @rule(seed=SEEDS)
    def remove_what_is_not_there(self, seed: int) -> None:
        block_id = random.Random(seed).choice(self.used())
        with pytest.raises(RuntimeError, match="not on the list"):
            self.queue.remove(self.blocks[block_id])

    @rule(seed=SEEDS)
    def append_n(self, seed: int) -> None:
        freed = self.some_used(seed)
        self.queue.append_n([self.blocks[block_id] for block_id in freed])
        self.append_all(freed)

    @precondition(lambda self: self.used())
    @rule(seed=SEEDS)
    def append(self, seed: int) -> None:
        block_id = random.Random(seed).choice(self.used())
        self.queue.append(self.blocks[block_id])
        self.append_all([block_id])

    @rule(seed=SEEDS)
    def prepend_n(self, seed: int) -> None:
        freed = self.some_used(seed)
        self.queue.prepend_n([self.blocks[block_id] for block_id in freed])
        assert self.reported == self.forget(freed)
        self.a[:0] = freed

    @precondition(lambda self: self.blocks)
    @rule(seed=SEEDS)
    def iterate_after(self, seed: int) -> None:
        free = self.free()
        start = random.Random(seed).randint(0, len(free))
        cursor = self.blocks[free[start - 1]] if start else None
        after = [block.block_id for block in self.queue.iter_blocks_after(cursor)]
        assert after == free[start:]

    # --- what the owner of the claims calls ----------------------------------

    @precondition(lambda self: len(self.claims) < 5)
    @rule(place=PLACES)
    def open_claim(self, place: tuple[Zone, float]) -> None:
        claim = self.queue.open_claim("owner", *place)
        self.claims.append(ModelClaim(claim, *place))

    @precondition(lambda self: self.claims and self.blocks)
    @rule(seed=SEEDS)
    def claim(self, seed: int) -> None:
        rng = random.Random(seed)
        claim = rng.choice(self.claims)
        chosen = rng.sample(range(len(self.blocks)), rng.randint(1, len(self.blocks)))
        for block_id in chosen[:4]:
            self.queue.claim(self.blocks[block_id], claim.claim)
            is_free = block_id in self.free()
            if is_free and self.enforce:
                self.unlink(block_id)
            self.forget([block_id])
            claim.blocks.add(block_id)
            if is_free and self.enforce:
                self.link(claim, [block_id])

    @precondition(lambda self: self.claims)
    @rule(seed=SEEDS, place=PLACES)
    def move_claim(self, seed: int, place: tuple[Zone, float]) -> None:
        claim = random.Random(seed).choice(self.claims)
        self.queue.move_claim(claim.claim, *place)
        if self.enforce and (claim.zone, claim.due_at) != place:
            run = self.extract(claim)
            claim.zone, claim.due_at = place
            if run:
                self.link(claim, run)

    @precondition(lambda self: self.claims)
    @rule(seed=SEEDS, before=st.booleans())
    def split_claim(self, seed: int, before: bool) -> None:
        rng = random.Random(seed)
        claim = rng.choice(self.claims)
        chosen = sorted(claim.blocks)
        rng.shuffle(chosen)
        chosen = chosen[: rng.randint(0, len(chosen))]
        split = ModelClaim(
            self.queue.split_claim(
                claim.claim,
                [self.blocks[block_id] for block_id in chosen],
                owner="other",
                before=before,
            ),
            claim.zone,
            claim.due_at,
            set(chosen),
        )
        self.claims.append(split)
        claim.blocks -= set(chosen)
        free = [block_id for block_id in chosen if block_id in claim.run]
        if not free:
            return
        claim.run = [block_id for block_id in claim.run if block_id not in free]
        zone = self.b if claim.zone is Zone.B else self.c
        split.run = free
        if claim.run:
            zone.insert(zone.index(claim) + (not before), split)
            return
        # What is left of the old claim has no place any more: as if used just now.
        zone.remove(claim)
        split.run = []
        self.link(split, free)

    @precondition(lambda self: self.claims)
    @rule(seed=SEEDS, front=st.booleans())
    def end_claim(self, seed: int, front: bool) -> None:
        claim = random.Random(seed).choice(self.claims)
        self.queue.end_claim(claim.claim, front=front)
        run = self.extract(claim)
        self.claims.remove(claim)
        self.a = run + self.a if front else self.a + run

    @precondition(lambda self: self.blocks)
    @rule(seed=SEEDS)
    def reuse_when_freed(self, seed: int) -> None:
        block_id = random.Random(seed).randrange(len(self.blocks))
        if self.claim_of(block_id) is None:
            self.queue.reuse_when_freed([self.blocks[block_id]])
            if block_id not in self.free():
                self.next_in_line.add(block_id)

    @rule()
    def unclaim_all(self) -> None:
        self.queue.unclaim_all()
        self.a = self.free()
        self.b, self.c, self.claims = [], [], []
        self.next_in_line.clear()
        assert self.queue._num_claims == 0

    @invariant()
    def agrees(self) -> None:
        self.queue.check_integrity()
        assert order(self.queue) == self.free()
        assert self.queue.num_free_blocks == len(self.free())
        assert self.queue.num_unclaimed == len(self.a)
        assert self.queue._num_claims == len(self.claims) + len(self.next_in_line)
        for claim in self.claims:
            assert claim.claim.num_free == len(claim.run)
        for block in self.blocks:
            expected = self.claim_of(block.block_id)
            known = self.queue.claims[block.block_id]
            if expected is not None:
                assert known is expected.claim
            else:
                assert known is None or known.owner is None
        self.reported.clear()
        self.shortages.clear()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=50, stateful_step_count=40)


#: How often each step of a long walk is taken.
STEPS = {
    "pop": 8,
    "pop1": 4,
    "free": 12,
    "free1": 4,
    "lost": 1,
    "open": 4,
    "claim": 14,
    "move": 4,
    "split": 3,
    "end": 2,
    "remove": 4,
    "mark": 2,
    "nothing": 0.2,
}


@pytest.mark.parametrize("enforce", [True, False])
@pytest.mark.parametrize("num_blocks", [5, 14, 30])
def test_a_long_walk_agrees_with_the_model(num_blocks: int, enforce: bool) -> None:
    """What takes many steps to build up: long runs of claims, and then pressure."""
    machine = QueueMachine()
    machine.build(num_blocks=num_blocks, enforce=enforce)
    rng = random.Random(f"{num_blocks} {enforce}")
    for _ in range(600):
        seed = rng.randrange(10**6)
        place = rng.choice(
            [(Zone.B, 0.0), (Zone.B, 6.0), (Zone.B, 8.0), (Zone.C, 5.0), (Zone.C, 7.0)]
        )
        step = rng.choices(list(STEPS), list(STEPS.values()))[0]
        if step == "pop":
            machine.popleft_n(seed=seed)
        elif step == "pop1":
            machine.popleft()
        elif step == "free":
            machine.append_n(seed=seed)
        elif step == "free1" and machine.used():
            machine.append(seed=seed)
        elif step == "lost":
            machine.prepend_n(seed=seed)
        elif step == "open" and len(machine.claims) < 6:
            machine.open_claim(place=place)
        elif step == "claim" and machine.claims:
            machine.claim(seed=seed)
        elif step == "move" and machine.claims:
            machine.move_claim(seed=seed, place=place)
        elif step == "split" and machine.claims:
            machine.split_claim(seed=seed, before=rng.random() < 0.5)
        elif step == "end" and machine.claims:
            machine.end_claim(seed=seed, front=rng.random() < 0.5)
        elif step == "remove" and machine.free():
            machine.remove(seed=seed)
        elif step == "mark":
            machine.reuse_when_freed(seed=seed)
        elif step == "nothing":
            machine.unclaim_all()
        machine.agrees()
    assert machine.num_reassigned > 20
