"""Which of a session's contexts a request belongs to, and what that changes.

A request *extends* the context whose blocks it contains. If it keeps most of one
but diverges (a compaction, a rewind, a retried turn), it *replaces* that context once
it completes. Otherwise it *opens* another: a side call never costs the main
conversation anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from sam_connector.core.block_index import BlockIndex
from sam_connector.core.limits import Limits
from sam_connector.core.retention import Retention
from sam_connector.core.session_index import Context, Session, SessionIndex
from sam_connector.core.session_tree import SessionTree
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.ttl import LeaseTable
from sam_connector.core.types import (
    BlockHash,
    BlockId,
    GroupId,
    SessionKey,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A request's blocks in one KV cache group.

    Attributes:
        hashes: content of its full blocks, computed or not.
        block_ids: where the first of them are, 0 where that is nowhere.
        num_passed: leading blocks that an attention window has moved past; a later
            request of the context needs none of them.
    """

    hashes: Sequence[BlockHash]
    block_ids: Sequence[BlockId]
    num_passed: int = 0


Chains = Mapping[GroupId, Chain]


class LazyBlockIds(Sequence[BlockId]):
    """Where each block of a context is, looked up only where it is asked for.

    Args:
        hashes: the context's blocks.
        find: where a block is, 0 for nowhere.
    """

    def __init__(
        self, hashes: Sequence[BlockHash], find: Callable[[BlockHash], BlockId]
    ) -> None:
        self._hashes = hashes
        self._find = find

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> BlockId: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockId]: ...
    def __getitem__(self, index: int | slice) -> BlockId | Sequence[BlockId]:
        if isinstance(index, slice):
            return list(map(self._find, self._hashes[index]))
        return self._find(self._hashes[index])


def _ignore(context: Context) -> None:
    """Default of what a ``ContextBook`` calls."""


class ContextBook:
    """Sessions, their contexts, and every change to either.

    Args:
        index: who holds what.
        leases: deadlines.
        retention: asked how much may still be protected.
        limits: bounds.
    """

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        retention: Retention,
        limits: Limits,
    ) -> None:
        self.index = index
        self.leases = leases
        self._retention = retention
        self.limits = limits
        self.sessions = SessionIndex()
        self.tree = SessionTree(limits.max_tree_depth)
        self.num_contexts = 0
        self.num_sessions_dropped = 0
        self.num_contexts_dropped = 0
        self.num_superseded = 0
        #: Called with a context that is no longer known.
        self.on_dropped: Callable[[Context], None] = _ignore
        #: Called with a context that is expected back at another time now.
        self.on_resume_changed: Callable[[Context], None] = _ignore

    @property
    def num_claimed(self) -> int:
        """Blocks of the engine that some session holds."""
        return self._retention.num_claimed

    # --- sessions ---------------------------------------------------------------

    def register(self, key: SessionKey) -> Session | None:
        """The session, new or known; ``None`` if there is no room for it."""
        session = self.sessions.get(key)
        if session is None:
            if len(self.sessions) >= self.limits.max_sessions:
                self._drop_oldest_session()
                if len(self.sessions) >= self.limits.max_sessions:
                    return None
            session = self.sessions.add(key)
        return session

    def drop_session(self, session: Session) -> None:
        """Forgets the session and its contexts."""
        for context in list(session.contexts):
            self.drop(context)
        self.sessions.remove(session)
        self.tree.unlink(session.key)

    def drop_if_empty(self, session: Session) -> None:
        """Forgets a session that has nothing left, unless its id was taken anew."""
        known = self.sessions.get(session.key) is session
        if known and not session.contexts and not session.num_active:
            self.drop_session(session)

    # --- contexts ----------------------------------------------------------------

    def match(
        self, session: Session, chains: Chains
    ) -> tuple[Context | None, Context | None]:
        """The context a request extends, or else the one it would replace."""
        extended: tuple[int, Context] | None = None
        replaced: tuple[int, Context] | None = None
        group_id, chain = next(iter(chains.items()))
        for context in session.contexts:
            common = self.index.common_length(context, group_id, chain.hashes)
            length = self.index.length(context, group_id)
            if common == length:
                if extended is None or common >= extended[0]:
                    extended = common, context
            elif 2 * common > length and (replaced is None or common >= replaced[0]):
                replaced = common, context
        if extended is not None and (replaced is None or extended[0] >= replaced[0]):
            return extended[1], None
        return None, None if replaced is None else replaced[1]

    def open(self, session: Session, size: int, now: float) -> Context | None:
        """A new context, in place of the oldest if the session has too many.

        A small newcomer never costs a larger context its lease: with nothing
        else to give up it is not recorded, and ``None`` is returned.

        Args:
            session: whose context it is.
            size: blocks it is about to hold in its first group.
            now: monotonic seconds.
        """
        if len(session.contexts) >= self.limits.max_contexts:
            victim = self._oldest_expendable(session, size)
            if victim is None:
                return None
            self.drop(victim)
            self.num_contexts_dropped += 1
        context = Context(session=session, last_used=now)
        session.contexts.append(context)
        self.num_contexts += 1
        self.leases.end(context, now)
        return context

    def extend(self, context: Context, chains: Chains) -> None:
        """Records blocks that are there, and never fewer than before."""
        lengths = {
            group_id: self.index.length(context, group_id) for group_id in chains
        }
        targets = {
            group_id: min(
                len(chain.hashes), max(len(chain.block_ids), lengths[group_id])
            )
            for group_id, chain in chains.items()
        }
        # More than the growth if a range in the middle was given up before.
        num_added = sum(
            target - self.index.num_held(context, group_id)
            for group_id, target in targets.items()
        )
        if num_added > 0 and not self._make_room(num_added, context.session):
            self.num_contexts_dropped += 1
            return
        for group_id, chain in chains.items():
            self.index.hold(
                context,
                group_id,
                chain.hashes,
                chain.block_ids,
                targets[group_id],
                deadline=context.deadline,
                num_leased=context.protect_blocks,
            )
            if chain.num_passed:
                self.index.release(context, group_id, end=chain.num_passed)

    def touch(self, context: Context, now: float) -> None:
        """Marks the context and its session as just used."""
        context.last_used = now
        contexts = context.session.contexts
        if contexts[-1] is not context:
            contexts.remove(context)
            contexts.append(context)
        if not context.deadline:
            self.leases.end(context, now)
        self.sessions.touch(context.session)

    def lease(
        self, context: Context, deadline: float, protect_blocks: int | None
    ) -> bool:
        """Protects the context (or its first blocks) until ``deadline``.

        A refused context keeps what it had.

        Returns:
            False if it is at rest and the protected share has no room for it.
        """
        if not context.num_active and not self._has_room(context, protect_blocks):
            return False
        self.leases.grant(context, deadline)
        context.protect_blocks = protect_blocks
        self._apply_deadline(context)
        self.sessions.touch(context.session)
        return True

    def end_lease(self, context: Context, now: float) -> None:
        """Takes the protection away; the context stays known."""
        self.leases.end(context, now)
        self._apply_deadline(context)
        self.sessions.touch(context.session)

    def expect(self, context: Context, resume_at: float, now: float) -> None:
        """The context's next request is expected at ``resume_at``.

        That changes neither what is kept nor for how long, only what goes first.
        """
        self.leases.resumes.expect(context, resume_at, now)
        self._set_resume(context, resume_at)

    def expect_nothing(self, context: Context) -> None:
        """The context's next request has come, or has not come in time."""
        if context.resume_at:
            self.leases.resumes.forget(context)
            self._set_resume(context, 0.0)

    def add_active(self, context: Context) -> None:
        """A request of the context starts to run."""
        self.expect_nothing(context)
        self.index.set_active(context, context.num_active + 1)

    def remove_active(self, context: Context, now: float) -> bool:
        """A request of the context has ended; with the last it comes to rest.

        All of a context is protected or nothing: half of one saves less than half
        its prefill.

        Returns:
            False if its lease ends here, since the protected share has no room.
        """
        fits = (
            context.num_active > 1
            or not context.deadline
            or self._has_room(context, context.protect_blocks)
        )
        if not fits:
            self.end_lease(context, now)
        self.index.set_active(context, context.num_active - 1)
        return fits

    def drop(self, context: Context, *, front: bool = False) -> None:
        """Forgets the context; ``front`` as for ``BlockIndex.release``."""
        for group_id in list(context.leaves):
            self.index.release(context, group_id, front=front)
        context.session.contexts.remove(context)
        self.leases.forget(context)
        self.num_contexts -= 1
        self.sessions.touch(context.session)
        self.on_dropped(context)

    def supersede(self, old: Context, new: Context) -> None:
        """``new`` takes the place of ``old``, including its lease."""
        if old.deadline and not new.deadline:
            self.lease(new, old.deadline, old.protect_blocks)
        self.drop(old)
        self.num_superseded += 1

    def blocks_of(
        self, context: Context, start: int = 0, end: int | None = None
    ) -> ContextBlocks:
        """The context's content, or a range of it, for a tier."""
        return ContextBlocks(
            block_hashes={
                group_id: self.index.hashes(context, group_id)[start:end]
                for group_id in context.leaves
            },
            block_start=start,
            is_whole=start == 0 and end is None,
            context_id=context.context_id,
            deadline=context.deadline,
            resume_at=context.resume_at,
        )

    # --- internals ---------------------------------------------------------------

    def _set_resume(self, context: Context, resume_at: float) -> None:
        self.index.set_resume(context, resume_at)
        self.on_resume_changed(context)

    def _apply_deadline(self, context: Context) -> None:
        for group_id in context.leaves:
            self.index.set_deadline(
                context, group_id, context.deadline, num_blocks=context.protect_blocks
            )

    def _has_room(self, context: Context, protect_blocks: int | None) -> bool:
        num_added = sum(
            self.index.num_unprotected(context, group_id, protect_blocks)
            for group_id in context.leaves
        )
        return self._retention.has_room(num_added)

    def _oldest_expendable(self, session: Session, size: int) -> Context | None:
        for context in session.contexts:
            expendable = not context.deadline or context.num_blocks <= size
            if expendable and not context.num_active:
                return context
        return None

    def _make_room(self, num_records: int, keep: Session) -> bool:
        """Drops old sessions until ``num_records`` more fit; bounded work."""
        for _ in range(8):
            if self._fits(num_records):
                return True
            if not self._drop_oldest_session(keep):
                return False
        return self._fits(num_records)

    def _fits(self, num_records: int) -> bool:
        used = max(self.index.num_records, self.index.num_blocks)
        return used + num_records <= self.limits.max_records

    def _drop_oldest_session(self, keep: Session | None = None) -> bool:
        victim = self.sessions.victim()
        if victim is None or victim is keep:
            return False
        self.drop_session(victim)
        self.num_sessions_dropped += 1
        return True
