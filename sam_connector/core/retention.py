"""From "who holds this content" to "where do its free blocks belong".

The RFC keeps two numbers per block, ``session_ref_cnt`` and ``ttl_expire_at``.
Blocks held by exactly the same contexts always have the same two numbers, so they
are kept once per such group of blocks, a ``Segment``, and so is the claim that the
free list knows them by. Renewing or ending the lease of a 4,096-block context is one
operation; what a block needs of its own is a reference and an index.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from sam_connector.core.claim import Claim
from sam_connector.core.expectations import Expectations
from sam_connector.core.types import NULL_BLOCK_ID, BlockHash, BlockId, GroupId, Zone
from sam_connector.core.zoned_queue import ZonedFreeQueue
from sam_connector.errors import IntegrityError


class BlockMetaUpdate(enum.Enum):
    """Outcome of ``BlockPoolPort.update_block_meta``."""

    UPDATED = enum.auto()
    #: The slot holds other content by now; nothing was changed.
    STALE = enum.auto()
    #: The null block, or an id outside the pool; nothing was changed.
    REFUSED = enum.auto()


class BlockPoolPort(Protocol):
    """The engine's block pool as the core sees it.

    Attributes:
        blocks: every block by id, as ``ZonedFreeQueue`` takes them.
        free_queue: the free ones among them.
    """

    @property
    def blocks(self) -> Sequence[Any]: ...

    @property
    def free_queue(self) -> ZonedFreeQueue: ...

    def update_block_meta(
        self,
        *,
        block_ids: Sequence[BlockId],
        expected_block_hashes: Sequence[BlockHash],
        group_id: GroupId,
        claim: Claim,
    ) -> list[BlockMetaUpdate]:
        """The one guarded door to the metadata of blocks.

        Puts each block under ``claim`` only if its slot still holds the content
        expected of it; never touches the reference count of active requests.
        """
        ...

    def reuse_when_freed(
        self, block_ids: Sequence[BlockId], *, num_own_users: int
    ) -> None:
        """Makes blocks in use next to be reused once they are free.

        Spares a block unless ``num_own_users`` are all the users it has.
        """
        ...


class Segment:
    """Consecutive blocks of one KV cache group, held by exactly the same contexts.

    A node of the radix tree in ``block_index``.

    Attributes:
        start: logical index of the first block in every context that has it.
        hashes: content of each block.
        block_ids: resident copy of each block, 0 where there is none.
        num_resident: how many have one.
        deadlines: the contexts that hold the segment, each with the deadline of
            its lease in monotonic seconds, 0 for none.
        num_sessions: distinct sessions among them (RFC: ``session_ref_cnt``).
        expire_at: the latest of the deadlines (RFC: ``ttl_expire_at``).
        num_latest: how many holders have that deadline.
        num_at_rest: holders with a live deadline and no running request.
        expectations: when its holders expect to be back; ``None`` if none has said.
        num_leaves: contexts that end here, whether or not they still hold it.
        zone: where its free blocks belong; ``None`` while nobody holds it.
        is_protected: counts towards the protected share of the pool.
        was_shared: more than one session has held it at a time.
    """

    __slots__ = (
        "block_ids",
        "children",
        "claim",
        "deadlines",
        "expectations",
        "expire_at",
        "group_id",
        "hashes",
        "is_protected",
        "num_at_rest",
        "num_latest",
        "num_leaves",
        "num_resident",
        "num_sessions",
        "parent",
        "start",
        "was_shared",
        "zone",
    )

    def __init__(self, group_id: GroupId, parent: Segment | None, start: int) -> None:
        self.group_id = group_id
        self.parent = parent
        self.children: dict[BlockHash, Segment] = {}
        self.start = start
        self.hashes: list[BlockHash] = []
        self.block_ids: list[BlockId] = []
        self.num_resident = 0
        self.deadlines: dict[Any, float] = {}
        self.num_sessions = 0
        self.expire_at = 0.0
        self.num_latest = 0
        self.num_at_rest = 0
        self.expectations: Expectations | None = None
        self.is_protected = False
        self.num_leaves = 0
        self.zone: Zone | None = None
        self.was_shared = False
        self.claim: Claim | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)

    @property
    def due_at(self) -> float:
        """When the first of its holders is due back; 0 if nobody can tell.

        The earliest moment that a holder expects to be back at. If some holders
        expect nothing, no later than the end of their lease, which is all that is
        known of them.
        """
        expected = self.expectations
        if not expected:
            return self.expire_at
        if self.expire_at and len(expected) < len(self.deadlines):
            return min(expected.earliest, self.expire_at)
        return expected.earliest

    def expect(self, holder: Any, resume_at: float) -> None:
        """A holder expects to be back at ``resume_at``; 0 takes that back."""
        if self.expectations is not None:
            self.expectations.set(holder, resume_at)
            if not self.expectations:
                self.expectations = None
        elif resume_at:
            self.expectations = Expectations({holder: resume_at})


class Retention:
    """Zones of segments, and which blocks are their resident copies.

    Args:
        pool: the engine's block pool.
        num_blocks: its size.
        max_protected: most blocks that leases of contexts at rest may protect.
    """

    def __init__(
        self, pool: BlockPoolPort, *, num_blocks: int, max_protected: int
    ) -> None:
        self._pool = pool
        self._queue = pool.free_queue
        self._max_protected = max_protected
        self._index_of = array("I", bytes(4 * num_blocks))
        #: Resident blocks that some session holds, each counted once.
        self.num_claimed = 0
        #: Those of them under the lease of a context at rest. What a running request
        #: uses is kept by its reference and needs no protection.
        self.num_protected = 0
        #: Claimed blocks handed out to requests, by the zone they were in.
        self.num_reassigned = {Zone.B: 0, Zone.C: 0}
        self._queue.on_reassigned = self._on_reassigned
        self._queue.on_reclaimed = self._on_reclaimed

    @property
    def num_unclaimed(self) -> int:
        """Free blocks in zone A."""
        return self._queue.num_unclaimed

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many more blocks may be protected."""
        return self.num_protected + num_blocks <= self._max_protected

    def attach(
        self,
        segment: Segment,
        offsets: Sequence[int],
        block_ids: Sequence[BlockId],
    ) -> None:
        """Records resident copies of blocks that have none.

        A copy that does not hold the content, or for which the protected share has
        no room, is not recorded.

        Args:
            segment: held by somebody.
            offsets: of the blocks in the segment.
            block_ids: the copy of each.
        """
        if segment.claim is None:
            return
        if segment.is_protected:
            room = max(0, self._max_protected - self.num_protected)
            offsets, block_ids = offsets[:room], block_ids[:room]
        if not block_ids:
            return
        hashes = segment.hashes
        updates = self._pool.update_block_meta(
            block_ids=block_ids,
            expected_block_hashes=[hashes[offset] for offset in offsets],
            group_id=segment.group_id,
            claim=segment.claim,
        )
        if updates.count(BlockMetaUpdate.UPDATED) < len(updates):
            done = [update is BlockMetaUpdate.UPDATED for update in updates]
            offsets = list(itertools.compress(offsets, done))
            block_ids = list(itertools.compress(block_ids, done))
        index_of, recorded, start = self._index_of, segment.block_ids, segment.start
        for offset, block_id in zip(offsets, block_ids, strict=True):
            index_of[block_id] = start + offset
            recorded[offset] = block_id
        segment.num_resident += len(offsets)
        self._count(segment, len(offsets))

    def refresh(
        self, segment: Segment, *, front: bool = False, num_own_users: int = 0
    ) -> None:
        """Brings a segment's claim in line with who holds it.

        O(1), unless blocks are given up while requests of their session run.

        Args:
            segment: the segment whose holders or deadlines changed.
            front: if nobody holds it any more, make its blocks next to be reused.
                Not so where several sessions had them: a prefix that agents share
                is likely to be used by the next.
            num_own_users: active requests of the session that gave it up.
        """
        old, new = segment.zone, _zone_of(segment)
        segment.was_shared |= segment.num_sessions > 1
        self._count(segment, -segment.num_resident)
        segment.zone, segment.is_protected = new, segment.num_at_rest > 0
        if new is None:
            if old is not None:
                self._give_up(segment, front and not segment.was_shared, num_own_users)
            return
        self._count(segment, segment.num_resident)
        if segment.claim is None:
            segment.claim = self._queue.open_claim(segment, new, segment.due_at)
        else:
            self._queue.move_claim(segment.claim, new, segment.due_at)

    def split(self, segment: Segment, at: int) -> Segment:
        """Moves the blocks before logical index ``at`` to a new segment above.

        Costs the size of the smaller half, once per fork.
        """
        upper = Segment(segment.group_id, segment.parent, segment.start)
        cut = at - segment.start
        upper.hashes, segment.hashes = segment.hashes[:cut], segment.hashes[cut:]
        upper.block_ids, segment.block_ids = (
            segment.block_ids[:cut],
            segment.block_ids[cut:],
        )
        upper.num_resident = cut - upper.block_ids.count(NULL_BLOCK_ID)
        segment.num_resident -= upper.num_resident
        upper.deadlines = dict(segment.deadlines)
        upper.num_sessions = segment.num_sessions
        upper.expire_at = segment.expire_at
        upper.num_latest = segment.num_latest
        upper.num_at_rest = segment.num_at_rest
        if segment.expectations is not None:
            upper.expectations = segment.expectations.copy()
        upper.is_protected = segment.is_protected
        upper.zone = segment.zone
        upper.was_shared = segment.was_shared
        upper.children = {segment.hashes[0]: segment}
        segment.parent, segment.start = upper, at
        if segment.claim is not None:
            self._split_claim(upper, segment, segment.claim)
        return upper

    def clear(self) -> None:
        """Forgets all claims, because the prefix cache was reset. O(pool)."""
        self._queue.unclaim_all()
        self.num_claimed = self.num_protected = 0

    # --- internals ------------------------------------------------------------

    def _count(self, segment: Segment, num_blocks: int) -> None:
        if segment.zone is not None:
            self.num_claimed += num_blocks
            self.num_protected += num_blocks * segment.is_protected

    def _give_up(self, segment: Segment, front: bool, num_own_users: int) -> None:
        claim = segment.claim
        assert claim is not None
        in_use = segment.num_resident - claim.num_free
        self._queue.end_claim(claim, front=front)
        if front and num_own_users and in_use and self._queue.enforce:
            self._pool.reuse_when_freed(
                [b for b in segment.block_ids if b != NULL_BLOCK_ID],
                num_own_users=num_own_users,
            )
        segment.claim = None
        segment.block_ids = [NULL_BLOCK_ID] * len(segment.block_ids)
        segment.num_resident = 0

    def _split_claim(self, upper: Segment, lower: Segment, claim: Claim) -> None:
        """Leaves the claim with the larger half and opens one for the other.

        Tail before prefix, as everywhere.
        """
        stays, moves = upper, lower
        if len(upper.block_ids) < len(lower.block_ids):
            stays, moves = lower, upper
        stays.claim, claim.owner = claim, stays
        blocks = [
            self._pool.blocks[block_id]
            for block_id in reversed(moves.block_ids)
            if block_id != NULL_BLOCK_ID
        ]
        moves.claim = self._queue.split_claim(
            claim, blocks, owner=moves, before=moves is lower
        )

    def _owner_of(self, block_id: BlockId) -> tuple[Segment, int] | None:
        """The segment, and the offset in it, that has this block as its copy."""
        claim = self._queue.claims[block_id]
        if claim is None or claim.owner is None:
            return None
        segment: Segment = claim.owner
        offset = self._index_of[block_id] - segment.start
        if not 0 <= offset < len(segment.block_ids):
            return None
        return (segment, offset) if segment.block_ids[offset] == block_id else None

    def _on_reclaimed(self, block: Any, claim: Claim) -> None:
        """A resident copy of one segment is about to be that of another."""
        owner = self._owner_of(block.block_id)
        if owner is not None:
            segment, offset = owner
            segment.block_ids[offset] = NULL_BLOCK_ID
            segment.num_resident -= 1
            self._count(segment, -1)

    def _on_reassigned(self, blocks: Sequence[Any], claim: Claim) -> None:
        segment: Segment = claim.owner
        start, recorded, num_lost = segment.start, segment.block_ids, 0
        for block in blocks:
            offset = self._index_of[block.block_id] - start
            if 0 <= offset < len(recorded) and recorded[offset] == block.block_id:
                recorded[offset] = NULL_BLOCK_ID
                num_lost += 1
        segment.num_resident -= num_lost
        self._count(segment, -num_lost)
        if segment.zone is not None:
            self.num_reassigned[segment.zone] += num_lost

    def check_integrity(self, segments: Sequence[Segment]) -> None:
        """Checks the accounts against ``segments``, all that are in the index."""
        claimed = sum(s.num_resident for s in segments if s.zone is not None)
        protected = sum(s.num_resident for s in segments if s.num_at_rest)
        if (claimed, protected) != (self.num_claimed, self.num_protected):
            raise IntegrityError(
                f"{claimed} claimed, {protected} protected; "
                f"counted {self.num_claimed}, {self.num_protected}"
            )
        owners: dict[BlockId, Segment] = {}
        for segment in segments:
            if segment.zone is not _zone_of(segment):
                raise IntegrityError(f"segment at {segment.start}: wrong zone")
            if (segment.claim is None) != (segment.zone is None):
                raise IntegrityError(f"segment at {segment.start}: claim")
            if (
                segment.claim is not None
                and self._queue.enforce
                and segment.claim.due_at != segment.due_at
            ):
                raise IntegrityError(f"segment at {segment.start}: wrong time")
            for offset, block_id in enumerate(segment.block_ids):
                if block_id == NULL_BLOCK_ID:
                    continue
                if block_id in owners:
                    raise IntegrityError(f"block {block_id} has two owners")
                owners[block_id] = segment
                if self._owner_of(block_id) != (segment, offset):
                    raise IntegrityError(f"block {block_id} is claimed elsewhere")
            if len(segment.block_ids) - segment.block_ids.count(
                NULL_BLOCK_ID
            ) != segment.num_resident or len(segment.hashes) != len(segment.block_ids):
                raise IntegrityError(f"segment at {segment.start}: resident count")


def _zone_of(segment: Segment) -> Zone | None:
    if not segment.deadlines:
        return None
    return Zone.C if segment.expire_at > 0.0 else Zone.B
