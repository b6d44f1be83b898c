"""The session-aware manager: the RFC's SAM.

It hears about requests at the boundaries where blocks change hands, keeps the
books (``contexts``, ``block_index``, ``ttl``), and through them decides in which
order free blocks are reused. Single-threaded; ``now`` is always an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sam_connector.core.block_index import BlockIndex
from sam_connector.core.contexts import Chain, Chains, ContextBook
from sam_connector.core.directory import Directory
from sam_connector.core.edits import EditController
from sam_connector.core.limits import Limits
from sam_connector.core.retention import BlockPoolPort, Retention
from sam_connector.core.session_index import Context, Session
from sam_connector.core.stats import Stats
from sam_connector.core.tier_relay import TierRelay
from sam_connector.core.tiers import (
    SupportsSessionAwareKVManagement,
    TierEventType,
)
from sam_connector.core.ttl import LeaseTable
from sam_connector.core.types import (
    Edit,
    EditResult,
    EditStatus,
    SessionHint,
    SessionKey,
    Zone,
)
from sam_connector.errors import IntegrityError


@dataclass(eq=False, slots=True)
class _RequestRecord:
    """A running request of a session.

    Attributes:
        sequence: order of admission over all requests.
        epoch: the session's when the request was added.
        context: where its blocks are recorded, once it has any.
        replaced: the context it takes the place of when it completes.
    """

    session: Session
    hint: SessionHint
    sequence: int
    epoch: int
    context: Context | None = None
    replaced: Context | None = None


class SessionAwareManager:
    """Sessions, and what they mean for the order of free blocks.

    Args:
        pool: the engine's block pool. If its free queue does not enforce claims,
            everything is accounted and nothing decided (the RFC's shadow mode).
        num_blocks: its size.
        limits: bounds.
        now: monotonic seconds.
        tiers: connectors to drive; asked whenever one is needed.
        ranges_enabled: whether block ranges in hints have an effect.
        id_prefix: of operation ids; tells the engines of one server apart.
    """

    def __init__(
        self,
        pool: BlockPoolPort,
        *,
        num_blocks: int,
        limits: Limits,
        now: float,
        tiers: Callable[[], Sequence[SupportsSessionAwareKVManagement]] = tuple,
        ranges_enabled: bool = False,
        id_prefix: str = "op",
    ) -> None:
        self._limits = limits
        self._ranges_enabled = ranges_enabled
        self._retention = Retention(
            pool,
            num_blocks=num_blocks,
            max_protected=int(num_blocks * limits.max_protected_fraction),
        )
        self._index = BlockIndex(self._retention)
        self._leases = LeaseTable(idle_ttl_s=limits.idle_ttl_s, now=now)
        self._book = ContextBook(self._index, self._leases, self._retention, limits)
        self._directory = Directory(self._book)
        self._edits = EditController(
            self._book, tiers, ranges_enabled=ranges_enabled, id_prefix=id_prefix
        )
        self._relay = TierRelay(self._book, self._edits, tiers)
        self._leases.on_change = self._relay.on_lease_changed
        self._book.on_dropped = self._relay.on_dropped
        self._book.on_resume_changed = self._relay.on_resume_changed
        self._requests: dict[str, _RequestRecord] = {}
        self._num_hinted = 0
        self._num_granted = 0
        self._num_refused = 0
        self._num_expired = 0
        self._num_rejected = 0

    # --- requests -----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do or to know."""
        return not (self._leases or self._requests or self._edits.operations.num_open)

    def tracks(self, request_id: str) -> bool:
        return request_id in self._requests

    def on_request_added(self, request_id: str, hint: SessionHint) -> None:
        """A request that names a session enters the engine."""
        self._num_hinted += 1
        if request_id in self._requests:
            self._num_rejected += 1
            return
        session = self._book.register(hint.session)
        if session is None:
            self._num_rejected += 1
            return
        if hint.parent is not None and not self._book.tree.link(
            hint.session, hint.parent
        ):
            self._num_rejected += 1
        session.num_active += 1
        self._requests[request_id] = _RequestRecord(
            session, hint, self._num_hinted, session.epoch
        )

    def on_blocks_assigned(self, request_id: str, chains: Chains, now: float) -> None:
        """Blocks were assigned to a request, for the first time or again.

        Recorded before it completes, so that an abort or a preemption leaves its
        prefix associated. Nothing is taken away from other contexts yet.

        Args:
            request_id: a request that ``tracks`` knows.
            chains: per group, the content of *all* its full blocks, and the ids
                of those assigned so far.
            now: monotonic seconds.
        """
        record = self._requests[request_id]
        context = self._record(record, chains, now)
        if context is None:
            return
        ttl_s = record.hint.ttl_s
        if ttl_s is not None and ttl_s > 0:
            deadline = now + self._ttl(ttl_s)
            if deadline > context.deadline:
                self._lease(context, deadline, record.hint.protect_blocks)

    def on_request_finished(
        self, request_id: str, chains: Chains, now: float, *, aborted: bool
    ) -> list[EditResult]:
        """A request is done, and its blocks are about to be freed.

        Args:
            request_id: a request that ``tracks`` knows; afterwards it does not.
            chains: per group, the content of its full blocks and the ids of those
                that are *computed*, beyond doubt.
            now: monotonic seconds.
            aborted: it was cut short, so it replaces nothing.

        Returns:
            The results of the edits in its hint.
        """
        record = self._requests[request_id]
        context = self._record(record, chains, now)
        if context is not None:
            self._book.touch(context, now)
            if not aborted:
                self._settle(record, context, now)
        results = self._apply_own_edits(record)
        del self._requests[request_id]
        record.session.num_active -= 1
        if record.context is not None and not self._book.remove_active(
            record.context, now
        ):
            self._num_refused += 1
        if context is not None:
            self._relay.on_request_finished(request_id, context)
        self._book.drop_if_empty(record.session)
        return results

    # --- control -------------------------------------------------------------------

    def apply_edits(
        self, key: SessionKey, edits: Sequence[Edit], now: float
    ) -> list[EditResult]:
        """Carries out edits outside any request."""
        self.advance(now)
        if len(edits) > self._limits.max_edits:
            reason = f"at most {self._limits.max_edits} edits in one call"
            return [
                EditResult(type=e.type, status=EditStatus.REJECTED, reason=reason)
                for e in edits
            ]
        return self._edits.apply(key, edits)

    def set_lease(
        self,
        key: SessionKey,
        ttl_s: float,
        now: float,
        *,
        expected_resume_s: float | None = None,
    ) -> EditStatus | None:
        """Leases all contexts of a session for ``ttl_s``; 0 ends their leases.

        Args:
            key: the session.
            ttl_s: seconds from now.
            now: monotonic seconds.
            expected_resume_s: when the session's next request is likely to come, in
                seconds from now; ``None`` leaves what is known.

        Returns:
            COMPLETED, or PARTIAL or REJECTED if the protected share of the pool has
            no room for some or any of them; ``None`` for an unknown session.
        """
        self.advance(now)
        session = self._book.sessions.get(key)
        if session is None:
            return None
        contexts, num_refused = list(session.contexts), 0
        deadline = now + self._ttl(ttl_s)
        for context in contexts:
            if not ttl_s > 0:
                self._book.end_lease(context, now)
            elif not self._lease(context, deadline, context.protect_blocks):
                num_refused += 1
            if expected_resume_s is not None:
                self._expect(context, expected_resume_s, now)
        if not num_refused:
            return EditStatus.COMPLETED
        is_partial = num_refused < len(contexts)
        return EditStatus.PARTIAL if is_partial else EditStatus.REJECTED

    def free_session(self, key: SessionKey, *, tree: bool = False) -> int:
        """Forgets a session, with ``tree`` its descendants first.

        Its blocks become ordinary free blocks; those in use stay untouched.

        Returns:
            How many known sessions were freed.
        """
        keys = self._book.tree.postorder(key) if tree else iter((key,))
        known = [s for s in map(self._book.sessions.get, keys) if s is not None]
        contexts = [context for session in known for context in session.contexts]
        # In the order of their ends, in which a shared prefix loses them cheaply.
        for context in sorted(contexts, key=lambda context: context.deadline):
            self._book.drop(context)
        for session in known:
            session.epoch += 1
            self._book.drop_session(session)
            self._relay.on_freed(session.key)
        return len(known)

    # --- time -----------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """Does a bounded amount of what is due.

        Returns:
            Whether to call again before another tick of the wheel has passed: more
            is due, or a tier may have something to say.
        """
        limit = self._limits.max_expiries_per_step
        expired = self._leases.take_expired(now, limit)
        for context in expired:
            self._expire(context, now)
        num_overdue = self._forget_overdue(now, limit)
        is_polled = self._relay.take_events()
        return is_polled or limit in (len(expired), num_overdue)

    def relieve(self, num_blocks: int, now: float) -> None:
        """The pool is about to break into claims: first give up what is not due.

        Args:
            num_blocks: unclaimed blocks missing.
            now: monotonic seconds.
        """
        self._forget_overdue(now, self._limits.max_expiries_per_step)
        wanted = self._retention.num_unclaimed + num_blocks
        for _ in range(self._limits.max_expiries_per_step):
            if self._retention.num_unclaimed >= wanted:
                return
            expired = self._leases.take_expired(now, 1)
            if not expired:
                return
            self._expire(expired[0], now)

    def on_cache_reset(self) -> None:
        """The engine's prefix cache was emptied: no block holds anything now."""
        self._index.clear()
        self._retention.clear()
        for session in list(self._book.sessions):
            for context in list(session.contexts):
                context.leaves.clear()  # nothing left to release one by one
                self._book.drop(context)
            self._book.drop_if_empty(session)

    # --- state -----------------------------------------------------------------------

    @property
    def directory(self) -> Directory:
        """The contexts, for a tier in this process."""
        return self._directory

    @property
    def book(self) -> ContextBook:
        """The sessions and contexts, to read from."""
        return self._book

    @property
    def edits(self) -> EditController:
        """Operations and their outcomes, to read from."""
        return self._edits

    def settle(self, now: float) -> None:
        """Catches up after a time without steps, so that ``stats`` is current."""
        expired = self._leases.take_expired(now, self._limits.max_sessions)
        for context in expired:
            self._expire(context, now)
        self._forget_overdue(now, self._limits.max_sessions)
        self.advance(now)

    def stats(self) -> Stats:
        book, retention = self._book, self._retention
        return Stats(
            sessions=len(book.sessions),
            contexts=book.num_contexts,
            records=self._index.num_records,
            timers=len(self._leases),
            running_requests=len(self._requests),
            claimed_blocks=retention.num_claimed,
            protected_blocks=retention.num_protected,
            hinted_requests=self._num_hinted,
            leases_granted=self._num_granted,
            leases_expired=self._num_expired,
            leases_broken=retention.num_reassigned[Zone.C],
            claims_broken=retention.num_reassigned[Zone.B],
            leases_refused=self._num_refused,
            sessions_dropped=book.num_sessions_dropped,
            contexts_dropped=book.num_contexts_dropped,
            contexts_superseded=book.num_superseded,
            hints_rejected=self._num_rejected,
            edits=dict(self._edits.counts),
            saved_bytes=self._relay.num_bytes[TierEventType.SAVE],
            loaded_bytes=self._relay.num_bytes[TierEventType.LOAD],
            tier_misses=self._relay.counts[TierEventType.MISS],
            tier_pressure=self._relay.counts[TierEventType.PRESSURE],
        )

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if any two accounts disagree. For tests."""
        contexts = [c for session in self._book.sessions for c in session.contexts]
        if len(contexts) != self._book.num_contexts:
            raise IntegrityError("number of contexts")
        self._book.sessions.check_integrity()
        self._book.tree.check_integrity()
        self._leases.check_integrity(contexts)
        self._index.check_integrity(contexts)
        active: dict[int, int] = {}
        for record in self._requests.values():
            active[id(record.session)] = active.get(id(record.session), 0) + 1
        for session in self._book.sessions:
            if session.num_active != active.get(id(session), 0):
                raise IntegrityError(f"{session.key}: running requests")
            if not session.contexts and not session.num_active:
                raise IntegrityError(f"{session.key}: empty session is kept")

    # --- internals -------------------------------------------------------------------

    def _apply_own_edits(self, record: _RequestRecord) -> list[EditResult]:
        """The edits of a request's hint, unless its session was freed meanwhile.

        A session that was begun anew under the same id is not theirs to touch.
        """
        key, edits = record.hint.session, record.hint.edits
        if self._book.sessions.get(key) is record.session:
            return self._edits.apply(key, edits)
        return [EditResult(type=e.type, status=EditStatus.NOT_FOUND) for e in edits]

    def _ttl(self, ttl_s: float) -> float:
        return min(ttl_s, self._limits.max_ttl_s)

    def _may_record(self, record: _RequestRecord) -> bool:
        """Whether the session still is the one the request was added to."""
        session = record.session
        return (
            record.epoch == session.epoch
            and self._book.sessions.get(session.key) is session
        )

    def _owns(self, record: _RequestRecord, context: Context) -> bool:
        """Whether the request is the newest of a context that still exists.

        An older request that completes late must not bring back what a newer one
        has moved on from.
        """
        return (
            self._may_record(record)
            and context.is_live
            and context.newest_request == record.sequence
        )

    def _record(
        self, record: _RequestRecord, chains: Chains, now: float
    ) -> Context | None:
        """Records what a request holds; ``None`` if that is not for it to say."""
        has_context = record.context is not None and record.context.is_live
        has_blocks = any(chain.block_ids for chain in chains.values())
        if not has_context and has_blocks and self._may_record(record):
            self._admit(record, chains, now)
        context = record.context
        if context is None or not self._owns(record, context):
            return None
        self._book.extend(context, chains)
        return context

    def _admit(self, record: _RequestRecord, chains: Chains, now: float) -> None:
        """Finds or opens the request's context."""
        context, replaced = self._book.match(record.session, chains)
        if context is None:
            size = len(next(iter(chains.values())).hashes)
            context = self._book.open(record.session, size, now)
            if context is None:
                return
        if record.context is not None:
            self._book.remove_active(record.context, now)
        record.context, record.replaced = context, replaced
        context.newest_request = record.sequence
        self._book.add_active(context)
        self._book.touch(context, now)

    def _settle(self, record: _RequestRecord, context: Context, now: float) -> None:
        """What a completed request changes beyond its own blocks."""
        replaced = record.replaced
        if (
            replaced is not None
            and replaced.is_live
            and not replaced.num_active
            and replaced.newest_request < record.sequence
        ):
            self._book.supersede(replaced, context)
        expected_resume_s = record.hint.expected_resume_s
        if expected_resume_s is not None:
            self._expect(context, expected_resume_s, now)
        ttl_s = record.hint.ttl_s
        if ttl_s is None:
            return
        if ttl_s > 0:
            self._lease(context, now + self._ttl(ttl_s), record.hint.protect_blocks)
        else:
            self._book.end_lease(context, now)

    def _expect(self, context: Context, expected_resume_s: float, now: float) -> None:
        self._book.expect(context, now + self._ttl(expected_resume_s), now)

    def _forget_overdue(self, now: float, limit: int) -> int:
        """What has not come back in time is kept like what was never expected."""
        overdue = self._leases.resumes.take_overdue(now, limit)
        for context in overdue:
            self._book.expect_nothing(context)
        return len(overdue)

    def _lease(
        self, context: Context, deadline: float, protect_blocks: int | None
    ) -> bool:
        granted = self._book.lease(
            context, deadline, protect_blocks if self._ranges_enabled else None
        )
        self._num_granted += granted
        self._num_refused += not granted
        return granted

    def _expire(self, context: Context, now: float) -> None:
        """A lease ends with its time, a context without one when long unused."""
        if context.deadline or context.num_active:
            self._num_expired += bool(context.deadline)
            self._book.end_lease(context, now)
        else:
            self._book.drop(context)
            self._book.drop_if_empty(context.session)


__all__ = ["Chain", "Chains", "SessionAwareManager"]
