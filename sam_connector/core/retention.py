"""From "who holds this content" to "where does its free block belong".

The RFC keeps two numbers per block, ``session_ref_cnt`` and ``ttl_expire_at``.
Blocks held by exactly the same contexts always have the same two numbers, so they
are kept once per run of such blocks (a ``Segment``); renewing the lease of a
4,096-block context is one assignment. What a block needs of its own is a reference
to its owner's placement and its index in the context.

When an owner changes zones its free blocks have to move. That is done in the
background, a bounded number per step (``sweep``), sooner if the pool runs short.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from sam_connector.core.types import NULL_BLOCK_ID, BlockHash, BlockId, GroupId, Zone
from sam_connector.core.zoned_queue import Placement, ZonedFreeQueue
from sam_connector.errors import IntegrityError


class BlockMetaUpdate(enum.Enum):
    """Outcome of ``BlockPoolPort.update_block_meta``."""

    UPDATED = enum.auto()
    #: The slot holds other content by now; nothing was changed.
    STALE = enum.auto()
    #: The null block, or an id outside the pool; nothing was changed.
    REFUSED = enum.auto()


class BlockPoolPort(Protocol):
    """The engine's block pool as the core sees it."""

    free_queue: ZonedFreeQueue

    def update_block_meta(
        self,
        *,
        block_id: BlockId,
        expected_block_hash: BlockHash,
        group_id: GroupId,
        placement: Placement | None,
    ) -> BlockMetaUpdate:
        """The one guarded door to a block's metadata.

        Changes the placement only if the slot still holds the expected content;
        never touches the reference count of active requests.
        """
        ...

    def evict(self, *, block_id: BlockId, num_own_users: int) -> None:
        """Ends the claim on a block and makes it next to be reused.

        A block in use is never touched: if ``num_own_users`` are all its users
        it follows when they are done, otherwise it becomes ordinary.
        """
        ...

    def holds(
        self, block_id: BlockId, block_hash: BlockHash, group_id: GroupId
    ) -> bool:
        """Whether the slot holds this content."""
        ...


class Segment:
    """Consecutive blocks of one KV cache group, held by exactly the same contexts.

    A node of the radix tree in ``block_index``.

    Attributes:
        start: logical index of the first block in every context that has it.
        block_ids: resident copy of each block, 0 where there is none.
        deadlines: the contexts that hold the segment, each with the deadline of
            its lease in monotonic seconds, 0 for none.
        num_sessions: distinct sessions among them (RFC: ``session_ref_cnt``).
        num_leaves: contexts that end here, whether or not they still hold it.
        expire_at: the latest of the deadlines (RFC: ``ttl_expire_at``).
        zone: where its free blocks belong; ``None`` while nobody holds it.
    """

    __slots__ = (
        "block_ids",
        "children",
        "deadlines",
        "expire_at",
        "group_id",
        "hashes",
        "num_leaves",
        "num_resident",
        "num_sessions",
        "parent",
        "placement",
        "start",
        "sweep",
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
        self.num_leaves = 0
        self.expire_at = 0.0
        self.zone: Zone | None = None
        self.placement: Placement | None = None
        self.sweep: _Sweep | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


class _Sweep:
    """Progress of moving one segment's free blocks to where they belong."""

    __slots__ = ("front", "num_own_users", "num_swept", "size")

    def __init__(self, size: int, *, front: bool, num_own_users: int) -> None:
        #: Blocks that come later have the right placement from the start.
        self.size = size
        self.front = front
        self.num_own_users = num_own_users
        self.num_swept = 0


class Retention:
    """Zones of segments, and the background work of moving their blocks.

    Args:
        pool: the engine's block pool.
        num_blocks: its size.
        max_protected: most blocks that may be in zone C at once.
        enforce: whether zones have any effect; off in shadow mode, where
            everything is accounted and nothing is decided.
    """

    def __init__(
        self,
        pool: BlockPoolPort,
        *,
        num_blocks: int,
        max_protected: int,
        enforce: bool = True,
    ) -> None:
        self._pool = pool
        self._max_protected = max_protected
        self._enforce = enforce
        self._index_of = array("I", bytes(4 * num_blocks))
        self._pending: deque[Segment] = deque()
        #: Resident blocks that some session holds, each counted once.
        self.num_claimed = 0
        #: Those of them under a live deadline.
        self.num_protected = 0
        #: Claimed blocks handed out to requests, by the zone they were in.
        self.num_reassigned = {Zone.B: 0, Zone.C: 0}
        #: Times protection was refused because the pool's share was used up.
        self.num_capped = 0
        pool.free_queue.on_reassigned = self._on_reassigned

    @property
    def has_pending_work(self) -> bool:
        return bool(self._pending)

    @property
    def num_unclaimed(self) -> int:
        """Free blocks in zone A."""
        return self._pool.free_queue.num_unclaimed

    def attach(self, segment: Segment, index: int, block_id: BlockId) -> bool:
        """Records ``block_id`` as the resident copy of a segment's block.

        A copy recorded earlier that still holds the content is kept. Returns
        whether the block has a resident copy now.
        """
        offset = index - segment.start
        block_hash, group_id = segment.hashes[offset], segment.group_id
        recorded = segment.block_ids[offset]
        if recorded != NULL_BLOCK_ID:
            if self._pool.holds(recorded, block_hash, group_id):
                return True
            self._forget(segment, offset)
        if block_id == NULL_BLOCK_ID or segment.zone is None:
            return False
        if segment.zone is Zone.C and self.num_protected >= self._max_protected:
            self.num_capped += 1
            return False
        owner = self._owner_of(block_id)
        if owner is not None:
            self._forget(*owner)
        update = self._pool.update_block_meta(
            block_id=block_id,
            expected_block_hash=block_hash,
            group_id=group_id,
            placement=segment.placement,
        )
        if update is not BlockMetaUpdate.UPDATED:
            return False
        self._index_of[block_id] = index
        segment.block_ids[offset] = block_id
        segment.num_resident += 1
        self._count(segment, 1)
        return True

    def refresh(
        self, segment: Segment, *, front: bool = False, num_own_users: int = 0
    ) -> None:
        """Brings a segment's placement in line with who holds it. O(1).

        Args:
            segment: the segment whose holders or deadlines changed.
            front: if nobody holds it any more, make its blocks next to be reused.
            num_own_users: active requests of the session that gave it up.
        """
        old, new = segment.zone, self._zone_of(segment)
        if old is new:
            return
        self._count(segment, -segment.num_resident)
        segment.zone = new
        self._count(segment, segment.num_resident)
        segment.placement = self._placement_of(segment)
        if segment.num_resident or segment.sweep is not None:
            if segment.sweep is None:
                self._pending.append(segment)
            segment.sweep = _Sweep(
                len(segment.block_ids),
                front=front and new is None and self._enforce,
                num_own_users=num_own_users,
            )

    def split(self, segment: Segment, at: int) -> Segment:
        """Moves the blocks before logical index ``at`` to a new segment above.

        The blocks keep the placement they have, so its owner may be a segment
        below theirs; ``_locate`` walks up. No work per block but two list slices.
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
        upper.zone = segment.zone
        upper.placement = self._placement_of(upper)
        upper.children = {segment.hashes[0]: segment}
        segment.parent, segment.start = upper, at
        if segment.sweep is not None:
            # Starts over in both halves; what was swept already costs a look.
            for half in (upper, segment):
                half.sweep = _Sweep(
                    len(half.block_ids),
                    front=segment.sweep.front,
                    num_own_users=segment.sweep.num_own_users,
                )
            self._pending.append(upper)
        return upper

    def sweep(self, max_blocks: int) -> int:
        """Moves up to ``max_blocks`` blocks to where they belong; returns how many.

        A context's tail ends up before its prefix, as in vLLM's own order.
        """
        remaining = max_blocks
        while self._pending and remaining > 0:
            segment = self._pending[0]
            sweep = segment.sweep
            assert sweep is not None
            stop = min(sweep.size, sweep.num_swept + remaining)
            for position in range(sweep.num_swept, stop):
                offset = position if sweep.front else sweep.size - 1 - position
                if segment.block_ids[offset] != NULL_BLOCK_ID:
                    self._sweep_block(segment, offset, sweep)
            remaining -= stop - sweep.num_swept
            sweep.num_swept = stop
            if stop == sweep.size:
                segment.sweep = None
                self._pending.popleft()
        return max_blocks - remaining

    def clear(self) -> None:
        """Forgets all claims, e.g. because the prefix cache was reset. O(pool)."""
        self._pool.free_queue.unclaim_all()
        self._pending.clear()
        self.num_claimed = self.num_protected = 0

    # --- internals ------------------------------------------------------------

    def _zone_of(self, segment: Segment) -> Zone | None:
        if not segment.deadlines:
            return None
        if segment.expire_at <= 0.0:
            return Zone.B
        if segment.zone is Zone.C:
            return Zone.C
        if self.num_protected + segment.num_resident > self._max_protected:
            self.num_capped += 1
            return Zone.B
        return Zone.C

    def _placement_of(self, segment: Segment) -> Placement | None:
        if segment.zone is None:
            return None
        return Placement(segment.zone if self._enforce else Zone.A, segment)

    def _count(self, segment: Segment, num_blocks: int) -> None:
        if segment.zone is not None:
            self.num_claimed += num_blocks
            self.num_protected += num_blocks * (segment.zone is Zone.C)

    def _sweep_block(self, segment: Segment, offset: int, sweep: _Sweep) -> None:
        block_id = segment.block_ids[offset]
        if sweep.front:
            segment.block_ids[offset] = NULL_BLOCK_ID
            segment.num_resident -= 1
            self._pool.evict(block_id=block_id, num_own_users=sweep.num_own_users)
            return
        update = self._pool.update_block_meta(
            block_id=block_id,
            expected_block_hash=segment.hashes[offset],
            group_id=segment.group_id,
            placement=segment.placement,
        )
        if update is not BlockMetaUpdate.UPDATED:
            # The content went without a reassignment; the claim goes with it.
            if self._owner_of(block_id) == (segment, offset):
                self._pool.evict(block_id=block_id, num_own_users=0)
            self._forget(segment, offset)
        elif segment.zone is None:
            segment.block_ids[offset] = NULL_BLOCK_ID
            segment.num_resident -= 1

    def _locate(self, block_id: BlockId, placement: Placement) -> tuple[Segment, int]:
        segment: Segment = placement.owner
        index = self._index_of[block_id]
        while index < segment.start:
            assert segment.parent is not None
            segment = segment.parent
        return segment, index - segment.start

    def _owner_of(self, block_id: BlockId) -> tuple[Segment, int] | None:
        """The segment, and the offset in it, that has this block as its copy."""
        placement = self._pool.free_queue.placements[block_id]
        if placement is None or placement.owner is None:
            return None
        segment, offset = self._locate(block_id, placement)
        return (segment, offset) if segment.block_ids[offset] == block_id else None

    def _forget(self, segment: Segment, offset: int) -> None:
        """Drops a resident copy that is gone or belongs to another segment."""
        if segment.block_ids[offset] == NULL_BLOCK_ID:
            return
        segment.block_ids[offset] = NULL_BLOCK_ID
        segment.num_resident -= 1
        self._count(segment, -1)

    def _on_reassigned(self, node: Any, placement: Placement) -> None:
        segment, offset = self._locate(node.block_id, placement)
        if segment.block_ids[offset] == node.block_id:
            self._forget(segment, offset)
            if segment.zone is not None:
                self.num_reassigned[segment.zone] += 1

    def check_integrity(self, segments: Sequence[Segment]) -> None:
        """Checks the accounts against ``segments``, all that are in the index."""
        held = [segment for segment in segments if segment.zone is not None]
        claimed = sum(segment.num_resident for segment in held)
        protected = sum(s.num_resident for s in held if s.zone is Zone.C)
        if (claimed, protected) != (self.num_claimed, self.num_protected):
            raise IntegrityError(
                f"{claimed} claimed, {protected} protected; "
                f"counted {self.num_claimed}, {self.num_protected}"
            )
        owners: dict[BlockId, Segment] = {}
        for segment in segments:
            resident = [b for b in segment.block_ids if b != NULL_BLOCK_ID]
            if len(resident) != segment.num_resident:
                raise IntegrityError(f"segment at {segment.start}: resident count")
            for offset, block_id in enumerate(segment.block_ids):
                if block_id == NULL_BLOCK_ID:
                    continue
                if block_id in owners:
                    raise IntegrityError(f"block {block_id} has two owners")
                owners[block_id] = segment
                placement = self._pool.free_queue.placements[block_id]
                if segment.sweep is None and placement is None:
                    raise IntegrityError(f"block {block_id} lost its placement")
                if placement is not None and self._locate(block_id, placement) != (
                    segment,
                    offset,
                ):
                    raise IntegrityError(f"block {block_id} is placed elsewhere")
                zone = None if placement is None else placement.zone
                if segment.sweep is None and segment.placement is not None:
                    if zone is not segment.placement.zone:
                        raise IntegrityError(f"block {block_id} is in zone {zone}")
