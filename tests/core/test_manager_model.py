"""The whole manager against ``model.py``, at random and after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sam_connector.core.limits import Limits
from sam_connector.core.types import NULL_BLOCK_ID, Zone
from tests.core.builders import EVICT, G0, Engine, evict_range, key
from tests.core.model import Model
from tests.core.pool import ids

SESSIONS = st.sampled_from("ST")
TTLS = st.sampled_from([None, None, 0, 1, 5, 20, 9999])
PROTECTS = st.sampled_from([None, None, 0, 2, 4])
EVICTS = st.sampled_from([False, False, True])
#: Few letters, so that contexts share prefixes, fork and repeat.
TEXTS = st.text("ab", min_size=1, max_size=7)
#: How a next turn's context follows from the last: length kept, text added.
TURNS = st.tuples(st.sampled_from([0, 1, 3, 4, 5, 99]), st.text("ab", max_size=3))


class ManagerMachine(RuleBasedStateMachine):
    """Two sessions with requests in every state, in an engine under pressure."""

    ranges = False

    @initialize(num_blocks=st.sampled_from([14, 24, 64]))
    def build(self, num_blocks: int) -> None:
        limits = Limits(
            max_contexts=3,
            max_ttl_s=50.0,
            idle_ttl_s=30.0,
            max_protected_fraction=1000.0,  # never reached
        )
        self.engine = Engine(num_blocks=num_blocks, limits=limits, ranges=self.ranges)
        self.manager = self.engine.manager
        self.model = Model(limits, self.engine.pool, ranges=self.ranges)
        self.waiting: dict[str, str] = {}
        self.evicts: dict[str, bool] = {}
        self.last_text = {"S": "", "T": ""}

    # --- requests ---------------------------------------------------------------------

    @rule(session=SESSIONS, text=TEXTS, ttl=TTLS, protect=PROTECTS, evict=EVICTS)
    def add(
        self,
        session: str,
        text: str,
        ttl: float | None,
        protect: int | None,
        evict: bool,
    ) -> None:
        self._add(session, text, ttl, protect, evict)

    @rule(session=SESSIONS, turn=TURNS, ttl=TTLS, protect=PROTECTS, evict=EVICTS)
    def add_next_turn(
        self,
        session: str,
        turn: tuple[int, str],
        ttl: float | None,
        protect: int | None,
        evict: bool,
    ) -> None:
        kept, added = turn
        text = (self.last_text[session][:kept] + added)[:9]
        self._add(session, text or "a", ttl, protect, evict)

    def _add(
        self,
        session: str,
        text: str,
        ttl: float | None,
        protect: int | None,
        evict: bool,
    ) -> None:
        if len(self.model.requests) >= 4:
            return
        self.last_text[session] = text
        edits = [EVICT] if evict else []
        request_id = self.engine.add(session, ttl=ttl, protect=protect, edits=edits)
        self.evicts[request_id] = evict
        self.model.add(request_id, session, ttl, protect)
        self.waiting[request_id] = text

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), num_blocks=st.sampled_from([99, 99, 1, 2, 4]))
    def admit(self, data: st.DataObject, num_blocks: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        text = self.waiting[request_id]
        if len(text) > self.engine.pool.num_free_blocks:
            return
        del self.waiting[request_id]
        self.engine.admit(request_id, text, num_blocks)
        self._assigned(request_id)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def allocate(self, data: st.DataObject, num_blocks: int) -> None:
        """The next chunk of a prompt."""
        request_id = data.draw(st.sampled_from(self.engine.running))
        run = self.engine.runs[request_id]
        num_blocks = min(num_blocks, len(run.text) - len(run.blocks[G0]))
        if 0 < num_blocks <= self.engine.pool.num_free_blocks:
            self.engine.allocate(request_id, num_blocks)
            self._assigned(request_id)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), text=st.text("ab", min_size=1, max_size=2))
    def generate(self, data: st.DataObject, text: str) -> None:
        request_id = data.draw(st.sampled_from(self.engine.running))
        run = self.engine.runs[request_id]
        missing = len(run.text) + len(text) - len(run.blocks[G0])
        if len(run.text) < 12 and missing <= self.engine.pool.num_free_blocks:
            self.engine.generate(request_id, text)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.engine.running))
        self.waiting[request_id] = self.engine.runs[request_id].text
        self.engine.preempt(request_id)

    @precondition(lambda self: self.model.requests)
    @rule(
        data=st.data(),
        aborted=st.booleans(),
        num_computed=st.sampled_from([99, 99, 99, 1, 3]),
    )
    def finish(self, data: st.DataObject, aborted: bool, num_computed: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.requests)))
        session = self.model.requests[request_id].session.key
        run = self.engine.runs.get(request_id)
        block_ids = ids(run.blocks.get(G0, []))[:num_computed] if run else []
        text = run.text if run else ""
        self.waiting.pop(request_id, None)
        self.model.finish(
            request_id, text, block_ids, self.engine.now, aborted=aborted
        )
        if self.evicts[request_id]:
            self.model.evict(session)
        self.model.forget_request(request_id)
        self.engine.finish(request_id, aborted=aborted, num_computed=num_computed)

    def _assigned(self, request_id: str) -> None:
        run = self.engine.runs[request_id]
        self.model.assign(
            request_id, run.text, list(ids(run.blocks[G0])), self.engine.now
        )

    # --- control --------------------------------------------------------------------------

    @rule(session=SESSIONS)
    def evict(self, session: str) -> None:
        self.engine.edit(session, EVICT)
        self.model.evict(session)

    @rule(session=SESSIONS, ttl=st.sampled_from([0, 2, 40]))
    def set_lease(self, session: str, ttl: float) -> None:
        self.manager.set_lease(key(session), ttl, self.engine.now)
        self.model.set_lease(session, ttl, self.engine.now)

    @rule(session=SESSIONS)
    def free_session(self, session: str) -> None:
        self.manager.free_session(key(session))
        self.model.free_session(session)

    # --- the engine ------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0, 1, 2, 10, 60]))
    def step(self, seconds: int) -> None:
        for _ in range(seconds):
            self.engine.step(1)
            self.model.advance(self.engine.now)

    @rule(num_blocks=st.integers(1, 12))
    def pressure(self, num_blocks: int) -> None:
        """Somebody without a session takes blocks and lets go of them again."""
        num_blocks = min(num_blocks, self.engine.pool.num_free_blocks)
        self.engine.pool.free_blocks(self.engine.fill(num_blocks))

    @rule(text=TEXTS)
    def stranger(self, text: str) -> None:
        """A request without a session, perhaps with the same content."""
        if len(text) <= self.engine.pool.num_free_blocks:
            self.engine.finish(self.engine.start(None, text))

    @rule()
    def preempt_all_and_reset(self) -> None:
        for request_id in self.engine.running:
            self.waiting[request_id] = self.engine.runs[request_id].text
            self.engine.preempt(request_id)
        assert self.engine.reset()
        self.model.reset()

    # --- after every step -----------------------------------------------------------------

    @invariant()
    def contexts_agree(self) -> None:
        self.engine.check_integrity()
        book = self.manager.book
        assert len(book.sessions) == len(self.model.sessions)
        for session in self.model.sessions.values():
            contexts = self.engine.contexts(session.key)
            assert self.engine.texts(session.key) == [c.text for c in session.contexts]
            assert [c.deadline for c in contexts] == [
                c.deadline for c in session.contexts
            ]
            assert [c.num_active for c in contexts] == [
                c.running for c in session.contexts
            ]

    @invariant()
    def blocks_agree(self) -> None:
        holds = self.model.holds()
        resident = self.model.forget_copies()
        known: dict[str, tuple[int, float]] = {}
        copies: dict[str, int] = {}
        for segment in self.manager.book.index.segments():
            for block_hash, block_id in zip(
                segment.hashes, segment.block_ids, strict=True
            ):
                if segment.deadlines:
                    content = block_hash.decode()
                    known[content] = segment.num_sessions, segment.expire_at
                    if block_id != NULL_BLOCK_ID:
                        copies[content] = block_id
        assert known == holds
        assert copies == resident
        stats = self.manager.stats()
        assert stats.claimed_blocks == len(resident)
        assert stats.protected_blocks == sum(holds[c][1] > 0 for c in resident)
        assert stats.records == sum(len(c.held) for c in self.model.contexts())

    @invariant()
    def zones_agree(self) -> None:
        holds, resident = self.model.holds(), self.model.forget_copies()
        expected = {
            block_id: Zone.C if holds[content][1] else Zone.B
            for content, block_id in resident.items()
        }
        queue = self.engine.pool.free_queue
        for block in queue.get_all_free_blocks():
            claim = queue.claims[block.block_id]
            zone = Zone.A if claim is None else claim.zone
            assert zone is expected.get(block.block_id, Zone.A), block

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request_id in list(self.model.requests):
            self.engine.finish(request_id, aborted=True)
        self.engine.step(200)
        self.engine.settle()
        self.engine.step(200)
        self.engine.assert_nothing_left()


class RangedMachine(ManagerMachine):
    """The same with ranges switched on."""

    ranges = True

    @rule(session=SESSIONS, start=st.integers(0, 4), size=st.integers(0, 5))
    def evict_range(self, session: str, start: int, size: int) -> None:
        (result,) = self.engine.edit(session, evict_range(start, start + size))
        done = self.model.evict_range(session, start, start + size)
        assert (result.status.value == "completed") == done


SETTINGS = settings(max_examples=60, stateful_step_count=40)
TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = SETTINGS
TestRangedMachine = RangedMachine.TestCase
TestRangedMachine.settings = SETTINGS
