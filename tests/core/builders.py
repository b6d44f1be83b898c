"""Short ways to say what happens to a session in an engine.

A context is written as a string, one letter a block. The hash of a block is all
letters up to it, so equal hashes mean equal prefixes, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sam_connector.core.contexts import Chain, Chains
from sam_connector.core.limits import Limits
from sam_connector.core.manager import SessionAwareManager
from sam_connector.core.session_index import Context
from sam_connector.core.tiers import (
    ContextBlocks,
    OperationHandle,
    Residency,
    SupportsSessionAwareKVManagement,
    TierEvent,
    TierEventType,
)
from sam_connector.core.types import (
    NULL_BLOCK_ID,
    BlockHash,
    Edit,
    EditResult,
    EditStatus,
    EditType,
    GroupId,
    SessionHint,
    SessionKey,
)
from tests.core.pool import FakeBlock, FakePool, ids

G0 = GroupId(0)
EVICT = Edit(type=EditType.EVICT)
OFFLOAD = Edit(type=EditType.OFFLOAD)
PREFETCH = Edit(type=EditType.PREFETCH)


def evict_range(start: int | None, end: int | None) -> Edit:
    return Edit(type=EditType.EVICT, block_start=start, block_end=end)


def key(session_id: str, tenant: str = "t") -> SessionKey:
    return SessionKey(tenant, session_id)


def chain(text: str) -> list[BlockHash]:
    """Block hashes of a context with one block per letter."""
    return [BlockHash(text[: end + 1].encode()) for end in range(len(text))]


def text_of(hashes: Sequence[BlockHash]) -> str:
    """The inverse of ``chain``."""
    return hashes[-1].decode() if hashes else ""


@dataclass
class Run:
    """A request: its content, and its blocks per group, none while preempted."""

    text: str
    blocks: dict[GroupId, list[FakeBlock]]


@dataclass
class Engine:
    """A manager over a fake pool, driven at the boundaries an engine has.

    With ``manager=False`` it is the stock engine. ``now`` moves by ``step`` only.
    """

    num_blocks: int = 65
    limits: Limits = field(default_factory=Limits)
    groups: tuple[GroupId, ...] = (G0,)
    ranges: bool = False
    enforce: bool = True
    managed: bool = True
    tiers: list[SupportsSessionAwareKVManagement] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.pool = FakePool(self.num_blocks, enforce=self.enforce)
        self.runs: dict[str, Run] = {}
        self.num_requests = 0
        if self.managed:
            self.manager = SessionAwareManager(
                self.pool,
                num_blocks=self.num_blocks,
                limits=self.limits,
                now=self.now,
                tiers=lambda: self.tiers,
                ranges_enabled=self.ranges,
            )
            self.pool.free_queue.on_shortage = lambda num_missing: self.manager.relieve(
                num_missing, self.now
            )

    # --- requests ------------------------------------------------------------

    def add(
        self,
        session: str | None = None,
        *,
        ttl: float | None = None,
        parent: str | None = None,
        protect: int | None = None,
        edits: Sequence[Edit] = (),
        resume: float | None = None,
        tenant: str = "t",
    ) -> str:
        """A request arrives; returns its id."""
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        if self.managed and session is not None:
            self.manager.on_request_added(
                request_id,
                SessionHint(
                    session=key(session, tenant),
                    parent=None if parent is None else key(parent, tenant),
                    ttl_s=ttl,
                    protect_blocks=protect,
                    edits=tuple(edits),
                    expected_resume_s=resume,
                ),
            )
        return request_id

    def admit(self, request_id: str, text: str, num_blocks: int | None = None) -> None:
        """The scheduler gives the request its first (all) blocks."""
        assigned = text[:num_blocks]
        blocks: dict[GroupId, list[FakeBlock]] = {}
        hits = min(len(self.pool.lookup(chain(assigned), g)) for g in self.groups)
        for group_id in self.groups:
            hit = self.pool.lookup(chain(assigned[:hits]), group_id)
            self.pool.touch(hit)
            blocks[group_id] = hit
        self.runs[request_id] = Run(text, blocks)
        self.allocate(request_id, len(assigned) - hits)

    def allocate(self, request_id: str, num_blocks: int) -> None:
        """Gives a running request more blocks, and computes them."""
        run = self.runs[request_id]
        for group_id in self.groups:
            blocks = run.blocks[group_id]
            blocks += self.pool.get_new_blocks(num_blocks)
            for block, block_hash in zip(blocks, chain(run.text), strict=False):
                if block.block_hash is None:
                    self.pool.cache(block, block_hash, group_id)
        if self.tracks(request_id):
            self.manager.on_blocks_assigned(
                request_id, self.chains(request_id), self.now
            )

    def generate(self, request_id: str, text: str) -> None:
        """The model goes on: no boundary, so the manager hears nothing."""
        run = self.runs[request_id]
        run.text += text
        for group_id in self.groups:
            blocks = run.blocks[group_id]
            blocks += self.pool.get_new_blocks(len(run.text) - len(blocks))
            for block, block_hash in zip(blocks, chain(run.text), strict=True):
                if block.block_hash is None:
                    self.pool.cache(block, block_hash, group_id)

    def preempt(self, request_id: str) -> None:
        """Takes the request's blocks away; ``admit`` resumes it."""
        self._free(request_id)

    def finish(
        self,
        request_id: str,
        *,
        aborted: bool = False,
        num_computed: int | None = None,
    ) -> list[EditResult]:
        results: list[EditResult] = []
        if self.tracks(request_id):
            results = self.manager.on_request_finished(
                request_id,
                self.chains(request_id, num_computed),
                self.now,
                aborted=aborted,
            )
        self._free(request_id)
        self.runs.pop(request_id, None)
        return results

    def turn(
        self,
        session: str | None,
        text: str,
        *,
        generated: str = "",
        ttl: float | None = None,
        parent: str | None = None,
        protect: int | None = None,
        edits: Sequence[Edit] = (),
        resume: float | None = None,
        aborted: bool = False,
    ) -> list[EditResult]:
        """A whole request, from arrival to end, followed by an engine step."""
        request_id = self.start(
            session,
            text,
            ttl=ttl,
            parent=parent,
            protect=protect,
            edits=edits,
            resume=resume,
        )
        self.generate(request_id, generated)
        results = self.finish(request_id, aborted=aborted)
        self.step()
        return results

    def start(
        self,
        session: str | None,
        text: str,
        *,
        ttl: float | None = None,
        parent: str | None = None,
        protect: int | None = None,
        edits: Sequence[Edit] = (),
        resume: float | None = None,
    ) -> str:
        request_id = self.add(
            session,
            ttl=ttl,
            parent=parent,
            protect=protect,
            edits=edits,
            resume=resume,
        )
        self.admit(request_id, text)
        return request_id

    # --- the rest of the engine ----------------------------------------------

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        if self.managed:
            self.manager.advance(self.now)

    def settle(self) -> None:
        """Catches up with all that is due."""
        self.manager.settle(self.now)

    def edit(self, session: str, *edits: Edit) -> list[EditResult]:
        return self.manager.apply_edits(key(session), edits, self.now)

    def fill(self, num_blocks: int) -> list[FakeBlock]:
        """Somebody without a session takes blocks."""
        return self.pool.get_new_blocks(num_blocks)

    def reset(self) -> bool:
        if not self.pool.reset():
            return False
        if self.managed:
            self.manager.on_cache_reset()
        return True

    # --- questions -----------------------------------------------------------

    @property
    def running(self) -> list[str]:
        """Requests that have blocks."""
        return sorted(request_id for request_id, run in self.runs.items() if run.blocks)

    def tracks(self, request_id: str) -> bool:
        return self.managed and self.manager.tracks(request_id)

    def chains(self, request_id: str, num_computed: int | None = None) -> Chains:
        run = self.runs.get(request_id, Run("", {}))
        return {
            group_id: Chain(
                hashes=chain(run.text),
                block_ids=ids(run.blocks.get(group_id, [])[:num_computed]),
            )
            for group_id in self.groups
        }

    def contexts(self, session: str) -> list[Context]:
        known = self.manager.book.sessions.get(key(session))
        return [] if known is None else list(known.contexts)

    def texts(self, session: str) -> list[str]:
        """The session's contexts, least recently used first."""
        index = self.manager.book.index
        return [
            text_of(index.hashes(c, self.groups[0])) for c in self.contexts(session)
        ]

    def deadlines(self, session: str) -> dict[str, float]:
        """Deadline of each of its contexts, in seconds from now."""
        return {
            text: context.deadline and context.deadline - self.now
            for text, context in zip(
                self.texts(session), self.contexts(session), strict=True
            )
        }

    def holds(self, text: str) -> list[tuple[int, float]]:
        """(``session_ref_cnt``, ``ttl_expire_at``) of each block of a context."""
        known = {
            segment.hashes[offset]: (segment.num_sessions, segment.expire_at)
            for segment in self.manager.book.index.segments()
            if segment.group_id == self.groups[0]
            for offset in range(len(segment.hashes))
        }
        return [known.get(block_hash, (0, 0.0)) for block_hash in chain(text)]

    def ref_cnts(self, text: str) -> list[int]:
        return [count for count, _ in self.holds(text)]

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        if not self.managed:
            return
        self.manager.check_integrity()
        recorded = {
            block_id
            for segment in self.manager.book.index.segments()
            for block_id in segment.block_ids
            if block_id != NULL_BLOCK_ID
        }
        owned = {
            block_id
            for block_id, claim in enumerate(self.pool.free_queue.claims)
            if claim is not None and claim.owner is not None
        }
        assert owned == recorded, "a claim without a record"
        stats, limits = self.manager.stats(), self.limits
        assert stats.sessions <= limits.max_sessions
        assert stats.records <= limits.max_records
        assert stats.protected_blocks <= int(
            self.num_blocks * limits.max_protected_fraction
        )
        for session in self.manager.book.sessions:
            assert len(session.contexts) <= limits.max_contexts

    def assert_nothing_left(self) -> None:
        """Every account is back at zero, and the queue is a stock queue again."""
        self.settle()
        self.check_integrity()
        stats = self.manager.stats()
        left = (
            stats.sessions,
            stats.contexts,
            stats.records,
            stats.timers,
            stats.running_requests,
            stats.claimed_blocks,
            stats.protected_blocks,
        )
        assert left == (0,) * 7
        assert not len(self.manager.book.leases.resumes)
        assert self.manager.is_idle
        assert not list(self.manager.book.index.segments())
        assert not len(self.manager.book.tree)
        assert self.pool.free_queue._num_claims == 0
        assert self.pool.free_queue.num_unclaimed == self.num_blocks - 1
        assert self.pool.num_free_blocks == self.num_blocks - 1

    def _free(self, request_id: str) -> None:
        run = self.runs.get(request_id)
        if run is None:
            return
        for blocks in run.blocks.values():
            self.pool.free_blocks(reversed(blocks))
        run.blocks = {}


class FakeTier(SupportsSessionAwareKVManagement):
    """A tier that does what the test tells it and remembers what it was told.

    Attributes:
        answer: what an operation is answered with.
    """

    def __init__(self, *capabilities: EditType) -> None:
        self.capabilities = frozenset(capabilities)
        self.answer = OperationHandle(status=EditStatus.ACCEPTED)
        self.calls: list[tuple[str, SessionKey, list[str]]] = []
        self.operation_ids: list[str] = []
        self.events: list[TierEvent] = []
        self.leases: dict[int, float] = {}
        self.resumes: dict[int, float] = {}
        self.released: list[tuple[SessionKey, int]] = []

    @property
    def session_capabilities(self) -> frozenset[EditType]:
        return self.capabilities

    def finish(self, operation_id: str, status: EditStatus) -> None:
        """The operation ends; heard of at the next step."""
        self.events.append(
            TierEvent(
                type=TierEventType.OPERATION,
                operation_id=operation_id,
                handle=replace(
                    self.answer,
                    status=status,
                    is_safe=status is EditStatus.COMPLETED,
                ),
            )
        )

    def register_cache(
        self,
        session: SessionKey,
        request_id: str,
        contents: Callable[[], ContextBlocks],
    ) -> None:
        self._note("register_cache", session, [contents()])

    def offload(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        return self._operate("offload", operation_id, session, contexts)

    def prefetch(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        return self._operate("prefetch", operation_id, session, contexts)

    def evict(
        self,
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
        *,
        purge: bool,
    ) -> OperationHandle:
        return self._operate("evict", operation_id, session, contexts)

    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        self.leases[context_id] = deadline

    def set_resume(
        self, session: SessionKey, context_id: int, resume_at: float
    ) -> None:
        self.resumes[context_id] = resume_at

    def release(self, session: SessionKey, context_id: int) -> None:
        self.released.append((session, context_id))

    def query_residency(
        self, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> Residency:
        return Residency(tier="fake", num_blocks=0)

    def take_session_events(self) -> Sequence[TierEvent]:
        events, self.events = self.events, []
        return events

    def _operate(
        self,
        name: str,
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> OperationHandle:
        self.operation_ids.append(operation_id)
        self._note(name, session, contexts)
        return self.answer

    def _note(
        self, name: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> None:
        texts = [
            text_of(next(iter(c.block_hashes.values()), []))[c.block_start :]
            for c in contexts
        ]
        self.calls.append((name, session, texts))
