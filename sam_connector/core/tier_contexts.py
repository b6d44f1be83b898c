"""Which sessions hold which slots of a memory tier, and until when.

The same radix tree and the same zones as for the engine's own blocks, over slots. A
context is followed here once some of its blocks are in the tier, and until its
session lets go of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from sam_connector.core.block_index import BlockIndex
from sam_connector.core.contexts import LazyBlockIds
from sam_connector.core.retention import Retention, Segment
from sam_connector.core.slot_pool import Content, SlotPool
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import (
    NULL_BLOCK_ID,
    BlockHash,
    BlockId,
    GroupId,
    SessionKey,
    Zone,
)


@dataclass(eq=False, slots=True, kw_only=True)
class _Context:
    """A context's share of the tier. A ``Holder``; nothing of it ever runs."""

    family: list[_Context]
    leaves: dict[GroupId, Segment] = field(default_factory=dict)
    num_active: int = 0
    deadline: float = 0.0
    resume_at: float = 0.0

    @property
    def siblings(self) -> list[_Context]:
        return self.family


class TierContexts:
    """The contexts that hold slots.

    Args:
        pool: the slots.
        max_protected: most slots that leases may protect.
    """

    def __init__(self, pool: SlotPool, *, max_protected: int) -> None:
        self._pool = pool
        self._retention = Retention(
            pool, num_blocks=len(pool.blocks), max_protected=max_protected
        )
        self._index = BlockIndex(self._retention)
        self._contexts: dict[SessionKey, dict[int, _Context]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._contexts.values()))

    @property
    def num_claimed(self) -> int:
        """Slots that some session holds."""
        return self._retention.num_claimed

    def keep(self, session: SessionKey, blocks: ContextBlocks) -> None:
        """The context holds what the tier has of ``blocks``, all of its content."""
        family = self._contexts.setdefault(session, {})
        context = family.get(blocks.context_id)
        if context is None:
            siblings = next(iter(family.values())).family if family else []
            context = family[blocks.context_id] = _Context(family=siblings)
            siblings.append(context)
        # Held first and leased then, so that a lease that does not fit costs nothing.
        context.deadline = 0.0
        for group_id, hashes in blocks.block_hashes.items():
            self._index.hold(
                context,
                group_id,
                hashes,
                LazyBlockIds(hashes, functools.partial(self._find, group_id)),
                len(hashes),
                deadline=0.0,
            )
        self.set_lease(session, blocks.context_id, blocks.deadline)
        self.set_resume(session, blocks.context_id, blocks.resume_at)

    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        """Leases the context's slots until ``deadline``; 0 for no longer."""
        context = self._contexts.get(session, {}).get(context_id)
        if context is None or context.deadline == deadline:
            return
        if deadline and not context.deadline:
            num_added = sum(
                self._index.num_unprotected(context, group_id)
                for group_id in context.leaves
            )
            if not self._retention.has_room(num_added):
                return
        context.deadline = deadline
        for group_id in context.leaves:
            self._index.set_deadline(context, group_id, deadline)

    def set_resume(
        self, session: SessionKey, context_id: int, resume_at: float
    ) -> None:
        """The context is expected back at ``resume_at``; 0 for no expectation."""
        context = self._contexts.get(session, {}).get(context_id)
        if context is not None and context.resume_at != resume_at:
            self._index.set_resume(context, resume_at)

    def release(
        self, session: SessionKey, context_id: int, *, front: bool = False
    ) -> None:
        """The context holds nothing any more.

        Args:
            session: whose context.
            context_id: which.
            front: make what nobody else holds the next to be given up.
        """
        family = self._contexts.get(session, {})
        context = family.pop(context_id, None)
        if context is None:
            return
        for group_id in list(context.leaves):
            self._index.release(context, group_id, front=front)
        context.family.remove(context)
        if not family:
            del self._contexts[session]

    def release_range(
        self, session: SessionKey, context_id: int, start: int, end: int
    ) -> None:
        """The context no longer holds blocks ``[start, end)``."""
        context = self._contexts.get(session, {}).get(context_id)
        if context is not None:
            for group_id in list(context.leaves):
                self._index.release(context, group_id, start=start, end=end, front=True)

    def num_held(self, session: SessionKey) -> int:
        """Slots that the session's contexts hold; shared ones once per context."""
        return sum(
            self._index.num_resident(context, group_id)
            for context in self._contexts.get(session, {}).values()
            for group_id in context.leaves
        )

    def is_held(self, content: Content) -> bool:
        """Whether any session holds the slot of a content."""
        slot = self._pool.get(content)
        claim = None if slot is None else self._pool.free_queue.claims[slot.block_id]
        return claim is not None and claim.zone is not Zone.A

    def clear(self) -> None:
        """The tier was emptied."""
        self._index.clear()
        self._retention.clear()
        self._contexts.clear()

    def check_integrity(self) -> None:
        contexts = [c for family in self._contexts.values() for c in family.values()]
        self._index.check_integrity(contexts)

    def _find(self, group_id: GroupId, block_hash: BlockHash) -> BlockId:
        slot = self._pool.get((group_id, block_hash))
        return NULL_BLOCK_ID if slot is None else BlockId(slot.block_id)
