"""The whole manager against ``model.py``, at random and after every step."""

from __future__ import annotations

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

from sam_connector.core.limits import Limits
from sam_connector.core.types import NULL_BLOCK_ID, Zone
from tests.core.builders import EVICT, G0, Engine, evict_range, key
from tests.core.model import Model
from tests.core.pool import ids

pytestmark = pytest.mark.timeout(120)

SESSIONS = st.sampled_from("ST")
RARELY = st.sampled_from([False, False, False, False, True])
#: Session, how much of its last text is kept and what is added, TTL, protected
#: blocks, whether it ends with an evict, and when it expects to be back. Few letters,
#: so that contexts share prefixes, grow, fork and repeat.
Asked = tuple[str, int, str, float | None, int | None, bool, float | None]
RESUMES = st.sampled_from([None, None, None, 0, 1, 3, 10, 25, 9999])
REQUESTS = st.tuples(
    SESSIONS,
    st.sampled_from([99, 99, 99, 0, 2, 4, 5]),
    st.text("ab", max_size=4),
    st.sampled_from([None, None, 0, 1, 5, 20, 9999]),
    st.sampled_from([None, None, 0, 2, 4]),
    st.sampled_from([False] * 9 + [True]),
    RESUMES,
)


class ManagerMachine(RuleBasedStateMachine):
    """Two sessions with requests in every state, in an engine under pressure."""

    ranges = False

    @initialize(
        num_blocks=st.sampled_from([14, 24, 64]),
        share=st.sampled_from([0.3, 1.0]),
    )
    def build(self, num_blocks: int, share: float) -> None:
        limits = Limits(
            max_contexts=3,
            max_ttl_s=50.0,
            idle_ttl_s=30.0,
            max_protected_fraction=share,
        )
        self.engine = Engine(num_blocks=num_blocks, limits=limits, ranges=self.ranges)
        self.manager = self.engine.manager
        self.model = Model(
            limits, self.engine.pool, ranges=self.ranges, copies=self.copies
        )
        self.waiting: dict[str, str] = {}
        self.evicts: dict[str, bool] = {}
        self.last_text = {"S": "", "T": ""}

    # --- requests ------------------------------------------------------------

    @rule(request=REQUESTS, generated=st.text("ab", max_size=2), aborted=RARELY)
    def turn(self, request: Asked, generated: str, aborted: bool) -> None:
        """A whole request."""
        request_id = self.begin_request(request)
        if request_id is not None:
            self.generate(request_id, generated)
            self.finish(request_id, aborted, 99)

    @rule(request=REQUESTS)
    def begin(self, request: Asked) -> None:
        self.begin_request(request)

    @precondition(lambda self: self.model.requests)
    @rule(
        which=st.integers(0, 3),
        event=st.sampled_from(
            ["finish", "finish", "admit", "allocate", "generate", "preempt"]
        ),
        number=st.integers(1, 4),
        aborted=RARELY,
    )
    def go_on(self, which: int, event: str, number: int, aborted: bool) -> None:
        """Something happens to a request that has not ended."""
        request_ids = sorted(self.model.requests)
        request_id = request_ids[which % len(request_ids)]
        running = request_id in self.engine.running
        if event == "finish":
            self.finish(request_id, aborted, 99 if number < 3 else number - 2)
        elif event == "admit" and not running:
            self.admit(request_id, 99 if number < 3 else number)
        elif event == "allocate" and running:
            self.allocate(request_id, number)
        elif event == "generate" and running:
            self.generate(request_id, "abab"[:number])
        elif event == "preempt" and running:
            self.preempt(request_id)

    def begin_request(self, request: Asked) -> str | None:
        if len(self.model.requests) >= 4:
            return None
        session, kept, added, ttl, protect, evict, resume = request
        text = ((self.last_text[session][:kept] + added) or "a")[:9]
        self.last_text[session] = text
        request_id = self.engine.add(
            session,
            ttl=ttl,
            protect=protect,
            edits=[EVICT] if evict else [],
            resume=resume,
        )
        self.model.add(request_id, session, ttl, protect, resume)
        self.evicts[request_id] = evict
        self.waiting[request_id] = text
        self.admit(request_id, 99)
        return request_id

    def admit(self, request_id: str, num_blocks: int) -> None:
        text = self.waiting[request_id]
        if len(text) <= self.engine.pool.num_free_blocks:
            del self.waiting[request_id]
            self.engine.admit(request_id, text, num_blocks)
            self.assigned(request_id)

    def allocate(self, request_id: str, num_blocks: int) -> None:
        """The next chunk of a prompt."""
        run = self.engine.runs[request_id]
        num_blocks = min(num_blocks, len(run.text) - len(run.blocks[G0]))
        if 0 < num_blocks <= self.engine.pool.num_free_blocks:
            self.engine.allocate(request_id, num_blocks)
            self.assigned(request_id)

    def generate(self, request_id: str, text: str) -> None:
        if request_id not in self.engine.running:
            return
        run = self.engine.runs[request_id]
        missing = len(run.text) + len(text) - len(run.blocks[G0])
        if len(run.text) < 11 and missing <= self.engine.pool.num_free_blocks:
            self.engine.generate(request_id, text)
            session = self.model.requests[request_id].session.key
            self.last_text[session] = run.text

    def preempt(self, request_id: str) -> None:
        self.waiting[request_id] = self.engine.runs[request_id].text
        self.engine.preempt(request_id)

    def finish(self, request_id: str, aborted: bool, num_computed: int) -> None:
        session = self.model.requests[request_id].session.key
        run = self.engine.runs.get(request_id)
        block_ids = ids(run.blocks.get(G0, []))[:num_computed] if run else []
        text = run.text if run else ""
        self.waiting.pop(request_id, None)
        now = self.engine.now
        self.engine.finish(request_id, aborted=aborted, num_computed=num_computed)
        self.model.finish(request_id, text, block_ids, now, aborted=aborted)
        owner = self.model.requests[request_id].session
        # Not if its session was freed and another begun under the same id.
        if self.evicts[request_id] and self.model.sessions.get(session) is owner:
            self.model.evict(session)
        self.model.forget_request(request_id, now)

    def assigned(self, request_id: str) -> None:
        run = self.engine.runs[request_id]
        self.model.assign(
            request_id, run.text, list(ids(run.blocks[G0])), self.engine.now
        )

    # --- control -------------------------------------------------------------

    @rule(
        session=SESSIONS,
        what=st.sampled_from(["lease", "lease", "evict", "free"]),
        ttl=st.sampled_from([0, 2, 15, 40]),
        resume=RESUMES,
    )
    def control(
        self, session: str, what: str, ttl: float, resume: float | None
    ) -> None:
        if what == "lease":
            now = self.engine.now
            status = self.manager.set_lease(
                key(session), ttl, now, expected_resume_s=resume
            )
            expected = self.model.set_lease(session, ttl, now, resume)
            assert (None if status is None else status.value) == expected
        elif what == "evict":
            self.engine.edit(session, EVICT)
            self.model.evict(session)
        else:
            self.manager.free_session(key(session))
            self.model.free_session(session)

    # --- the engine ----------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 1, 2, 4, 10, 35]))
    def steps(self, seconds: int) -> None:
        for _ in range(seconds):
            self.engine.step(1)
            self.model.advance(self.engine.now)

    @rule(num_blocks=st.integers(1, 12), text=st.text("ab", max_size=7))
    def strangers(self, num_blocks: int, text: str) -> None:
        """Requests without a session: pressure, and perhaps the same content."""
        num_free = self.engine.pool.num_free_blocks
        if text and len(text) <= num_free:
            self.engine.finish(self.engine.start(None, text))
        else:
            blocks = self.engine.fill(min(num_blocks, num_free))
            self.engine.pool.free_blocks(blocks)

    @rule(really=RARELY)
    def preempt_all_and_reset(self, really: bool) -> None:
        if not really:
            return
        for request_id in self.engine.running:
            self.preempt(request_id)
        assert self.engine.reset()
        self.model.reset()

    def copies(self) -> dict[str, int]:
        """The manager's resident copy of each content."""
        return {
            block_hash.decode(): block_id
            for segment in self.manager.book.index.segments()
            for block_hash, block_id in zip(
                segment.hashes, segment.block_ids, strict=True
            )
            if block_id != NULL_BLOCK_ID
        }

    # --- after every step ----------------------------------------------------

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
            assert [c.resume_at for c in contexts] == [
                c.resume_at for c in session.contexts
            ]
            assert [c.num_active for c in contexts] == [
                c.running for c in session.contexts
            ]

    @invariant()
    def blocks_agree(self) -> None:
        holds = self.model.holds()
        resident = self.model.forget_copies()
        known = {
            block_hash.decode(): (segment.num_sessions, segment.expire_at)
            for segment in self.manager.book.index.segments()
            if segment.deadlines
            for block_hash in segment.hashes
        }
        assert known == holds
        assert self.copies() == resident
        stats = self.manager.stats()
        assert stats.claimed_blocks == len(resident)
        assert stats.protected_blocks == len(self.model.protected())
        assert stats.leases_granted == self.model.num_granted
        assert stats.leases_refused == self.model.num_refused
        assert stats.records == sum(len(c.held) for c in self.model.contexts())

    @invariant()
    def zones_agree(self) -> None:
        holds, resident = self.model.holds(), self.model.forget_copies()
        expected = {
            block_id: (Zone.C if holds[content][1] else Zone.B, self.model.due(content))
            for content, block_id in resident.items()
        }
        queue = self.engine.pool.free_queue
        for block in queue.get_all_free_blocks():
            claim = queue.claims[block.block_id]
            if claim is None or claim.zone is Zone.A:
                assert block.block_id not in expected, block
            else:
                assert expected[block.block_id] == (claim.zone, claim.due_at), block

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
    def give_up_range(self, session: str, start: int, size: int) -> None:
        (result,) = self.engine.edit(session, evict_range(start, start + size))
        done = self.model.evict_range(session, start, start + size)
        assert (result.status.value == "completed") == done


SETTINGS = settings(max_examples=25, stateful_step_count=40)
TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = SETTINGS
TestRangedMachine = RangedMachine.TestCase
TestRangedMachine.settings = SETTINGS
