"""Slots and who holds them against plain sets, at random and after every step."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

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

from sam_connector.core.slot_pool import Content, Slot, SlotPool
from sam_connector.core.tier_contexts import TierContexts
from sam_connector.core.types import Zone
from tests.core.builders import key
from tests.core.slots import blocks_of, contents

pytestmark = pytest.mark.timeout(120)

SESSIONS = st.sampled_from("st")
CONTEXTS = st.integers(1, 3)
#: Few letters, so that contexts share prefixes, grow and fork.
TEXTS = st.text("ab", min_size=1, max_size=6)
DEADLINES = st.sampled_from([0.0, 0.0, 5.0, 9.0])
RESUMES = st.sampled_from([0.0, 3.0, 7.0])
RARELY = st.sampled_from([False] * 6 + [True])


@dataclass
class Kept:
    """A context in the model."""

    text: str
    held: set[Content]
    deadline: float


@dataclass
class CopyInModel:
    """A copy under way; ``wanted`` is what a store will publish."""

    slots: list[Slot]
    wanted: list[Content] = field(default_factory=list)


class TierMachine(RuleBasedStateMachine):
    """Two sessions in a tier that is too small for them."""

    max_protected = 10_000

    @initialize(num_slots=st.sampled_from([3, 6, 20]))
    def build(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.contexts = TierContexts(self.pool, max_protected=self.max_protected)
        self.kept: dict[tuple[str, int], Kept] = {}
        self.slot_of: dict[Content, Slot] = {}
        #: Content whose copy the sessions that hold it know of.
        self.known: set[Content] = set()
        self.copies: list[CopyInModel] = []

    # --- the model ------------------------------------------------------------

    def holders(self, content: Content) -> list[Kept]:
        return [kept for kept in self.kept.values() if content in kept.held]

    def zone(self, content: Content) -> Zone:
        if content not in self.known:
            return Zone.A
        return Zone.C if any(k.deadline for k in self.holders(content)) else Zone.B

    def tidy(self) -> None:
        """Nobody knows a copy that is gone or that nobody holds."""
        self.known = {
            content
            for content in self.known
            if content in self.slot_of and self.holders(content)
        }

    def pinned(self) -> Counter[int]:
        slots = itertools.chain.from_iterable(copy.slots for copy in self.copies)
        return Counter(slot.index for slot in slots)

    def free(self) -> list[Content]:
        pinned = self.pinned()
        return [c for c, slot in self.slot_of.items() if slot.index not in pinned]

    # --- copies ---------------------------------------------------------------

    @rule(
        session=SESSIONS,
        context_id=CONTEXTS,
        text=TEXTS,
        deadline=DEADLINES,
        breaks_leases=RARELY,
    )
    def save(
        self,
        session: str,
        context_id: int,
        text: str,
        deadline: float,
        breaks_leases: bool,
    ) -> None:
        """What a context has is stored, as far as it goes, and held."""
        if self.store(text, breaks_leases):
            self.end_copy(len(self.copies) - 1, True)
        self.keep(session, context_id, text, deadline)

    @rule(text=TEXTS, breaks_leases=RARELY)
    def begin_store(self, text: str, breaks_leases: bool) -> None:
        if len(self.copies) < 6:
            self.store(text, breaks_leases)

    def store(self, text: str, breaks_leases: bool) -> bool:
        on_the_way = {c for copy in self.copies for c in copy.wanted}
        wanted = [
            c for c in contents(text) if c not in self.slot_of and c not in on_the_way
        ]
        num_free = self.pool.num_slots - len(self.pinned())
        free = self.free()
        zones = sorted(self.zone(content) for content in free)
        zones = [Zone.A] * (num_free - len(free)) + zones
        limit = len(zones) if breaks_leases else len(zones) - zones.count(Zone.C)
        num_slots = min(len(wanted), limit)
        if not breaks_leases:
            assert self.pool.num_available(len(wanted)) == num_slots
        if num_slots == 0:
            return False
        before = {slot.index: content for content, slot in self.slot_of.items()}
        zone_of = {content: self.zone(content) for content in free}
        slots = self.pool.allocate(num_slots)
        lost = [before[slot.index] for slot in slots if slot.index in before]
        given_up = sorted(zone_of[content] for content in lost)
        expected = zones[:num_slots]
        assert [z for z in given_up if z] == [z for z in expected if z]
        for content in lost:
            del self.slot_of[content]
        self.copies.append(CopyInModel(slots, wanted[:num_slots]))
        self.tidy()
        return True

    @rule(text=TEXTS)
    def load(self, text: str) -> None:
        found = [c for c in contents(text) if c in self.slot_of]
        if found and len(self.copies) < 6:
            slots = [self.slot_of[content] for content in found]
            self.pool.pin(slots)
            self.copies.append(CopyInModel(slots))

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 5), works=st.sampled_from([True, True, False]))
    def end_copy(self, which: int, works: bool) -> None:
        copy = self.copies.pop(which % len(self.copies))
        if works:
            for content, slot in zip(copy.wanted, copy.slots, strict=False):
                self.pool.publish(slot, content)
                self.slot_of[content] = slot
        elif not copy.wanted:
            for slot in copy.slots:
                if slot.content is not None:
                    del self.slot_of[slot.content]
                    self.pool.forget(slot.content)
        self.pool.unpin(copy.slots[::-1])
        self.tidy()

    @rule(really=RARELY)
    def reset(self, really: bool) -> None:
        if really:
            self.contexts.clear()
            self.pool.clear()
            self.kept.clear()
            self.slot_of.clear()
            self.known.clear()
            for copy in self.copies:
                copy.wanted = []

    # --- sessions -------------------------------------------------------------

    @rule(session=SESSIONS, context_id=CONTEXTS, text=TEXTS, deadline=DEADLINES)
    def keep(self, session: str, context_id: int, text: str, deadline: float) -> None:
        self.contexts.keep(key(session), blocks_of(text, context_id, deadline))
        held = set(contents(text))
        self.kept[session, context_id] = Kept(text, held, deadline)
        self.known |= held & set(self.slot_of)
        self.tidy()

    @rule(session=SESSIONS, context_id=CONTEXTS, resume_at=RESUMES)
    def set_resume(self, session: str, context_id: int, resume_at: float) -> None:
        """Changes the order inside a zone, which the integrity check looks at."""
        self.contexts.set_resume(key(session), context_id, resume_at)

    @rule(session=SESSIONS, context_id=CONTEXTS, deadline=DEADLINES)
    def set_lease(self, session: str, context_id: int, deadline: float) -> None:
        self.contexts.set_lease(key(session), context_id, deadline)
        if (session, context_id) in self.kept:
            self.kept[session, context_id].deadline = deadline

    @rule(session=SESSIONS, context_id=CONTEXTS, front=st.booleans())
    def release(self, session: str, context_id: int, front: bool) -> None:
        self.contexts.release(key(session), context_id, front=front)
        self.kept.pop((session, context_id), None)
        self.tidy()

    @rule(
        session=SESSIONS,
        context_id=CONTEXTS,
        start=st.integers(0, 4),
        size=st.integers(1, 3),
    )
    def release_range(
        self, session: str, context_id: int, start: int, size: int
    ) -> None:
        self.contexts.release_range(key(session), context_id, start, start + size)
        if kept := self.kept.get((session, context_id)):
            kept.held -= set(contents(kept.text)[start : start + size])
            self.tidy()

    # --- after every step -----------------------------------------------------

    @invariant()
    def accounts_agree_with_each_other(self) -> None:
        self.pool.check_integrity()
        self.contexts.check_integrity()

    @invariant()
    def slots_agree(self) -> None:
        assert {c: self.pool.get(c) for c in self.pool.contents()} == self.slot_of
        assert self.pool.num_used == len(self.slot_of)
        assert {
            slot.index: slot.num_pins for slot in self.pool.blocks[1:] if slot.num_pins
        } == self.pinned()
        assert self.pool.num_pinned == len(self.pinned())

    @invariant()
    def holders_agree(self) -> None:
        assert len(self.contexts) == len(self.kept)
        self.claims_agree()

    def claims_agree(self) -> None:
        assert self.contexts.num_claimed == len(self.known)
        for session in "st":
            assert self.contexts.num_held(key(session)) == sum(
                len(kept.held & self.known)
                for (owner, _), kept in self.kept.items()
                if owner == session
            )
        claims = self.pool.free_queue.claims
        for content in self.free():
            claim = claims[self.slot_of[content].block_id]
            zone = Zone.A if claim is None else claim.zone
            assert zone is self.zone(content), content

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.copies:
            self.end_copy(0, False)
        for session, context_id in list(self.kept):
            self.release(session, context_id, True)
        assert self.contexts.num_claimed == 0
        assert self.contexts._contexts == {}
        assert self.pool.free_queue.num_unclaimed == self.pool.num_slots
        self.accounts_agree_with_each_other()


class TightTierMachine(TierMachine):
    """The same with room for few leases: which are refused depends on the order."""

    max_protected = 4

    def zone(self, content: Content) -> Zone:
        slot = self.slot_of[content]
        claim = self.pool.free_queue.claims[slot.block_id]
        return Zone.A if claim is None else claim.zone

    def claims_agree(self) -> None:
        num_leased = sum(self.zone(content) is Zone.C for content in self.free())
        assert num_leased <= self.max_protected
        assert self.contexts.num_claimed <= len(self.slot_of)


SETTINGS = settings(max_examples=120, stateful_step_count=40)
TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = SETTINGS
TestTightTierMachine = TightTierMachine.TestCase
TestTightTierMachine.settings = SETTINGS
