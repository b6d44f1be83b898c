"""Session-to-block and block-to-session indexes in one radix tree.

A block hash covers everything before the block, so contexts that share a prefix
share a path from a root. Each node is a ``Segment``: a run of blocks held by exactly
the same contexts. A context that grows touches its last segment; one that forks
splits a segment once; one that ends leaves its segments. The cost of all of these
is the number of segments on the path plus the number of *new* blocks, however long
the context is.

(The radix tree over token runs is known from SGLang's RadixAttention; here it
indexes vLLM's block hashes and decides nothing about matching.)
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

from sam_connector.core.retention import Retention, Segment
from sam_connector.core.types import NULL_BLOCK_ID, BlockHash, BlockId, GroupId
from sam_connector.errors import IntegrityError


class Holder(Protocol):
    """Whoever holds blocks: one context of a session.

    Attributes:
        leaves: the deepest segment held, per KV cache group.
        num_active: requests of it that run.
        resume_at: when its next request is expected, monotonic seconds; 0 if nobody
            has said.
    """

    leaves: dict[GroupId, Segment]
    num_active: int
    resume_at: float

    @property
    def siblings(self) -> Sequence[Holder]:
        """All holders of the same session, this one included."""
        ...


class BlockIndex:
    """Which contexts hold which content, and where its resident copy is.

    Args:
        retention: told about every change of who holds what.
    """

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._roots: dict[tuple[GroupId, BlockHash], Segment] = {}
        #: (block, context) pairs recorded, the RFC's TTL records.
        self.num_records = 0
        #: Blocks in the tree, each once; those of contexts that were given up but
        #: not forgotten are among them.
        self.num_blocks = 0

    # --- questions ------------------------------------------------------------

    def path(self, holder: Holder, group_id: GroupId) -> list[Segment]:
        """The holder's segments of one group, first to last."""
        path = []
        segment = holder.leaves.get(group_id)
        while segment is not None:
            path.append(segment)
            segment = segment.parent
        path.reverse()
        return path

    def length(self, holder: Holder, group_id: GroupId) -> int:
        """Blocks recorded for the holder in one group."""
        leaf = holder.leaves.get(group_id)
        return 0 if leaf is None else leaf.end

    def common_length(
        self,
        holder: Holder,
        group_id: GroupId,
        hashes: Sequence[BlockHash],
        num_blocks: int | None = None,
    ) -> int:
        """How many leading blocks the holder and ``hashes[:num_blocks]`` share."""
        if num_blocks is None:
            num_blocks = len(hashes)
        common = 0
        for segment in self.path(holder, group_id):
            matched = _common(segment, hashes, num_blocks)
            common += matched
            if matched < len(segment.hashes):
                break
        return common

    def hashes(self, holder: Holder, group_id: GroupId) -> list[BlockHash]:
        """The holder's block hashes of one group, in order."""
        return [h for s in self.path(holder, group_id) for h in s.hashes]

    def num_resident(self, holder: Holder, group_id: GroupId) -> int:
        return sum(
            segment.num_resident
            for segment in self.path(holder, group_id)
            if holder in segment.deadlines
        )

    def num_held(self, holder: Holder, group_id: GroupId) -> int:
        """Blocks the holder holds: its length less the ranges given up."""
        return sum(
            len(segment.hashes)
            for segment in self.path(holder, group_id)
            if holder in segment.deadlines
        )

    def num_unprotected(
        self, holder: Holder, group_id: GroupId, num_blocks: int | None = None
    ) -> int:
        """Resident blocks that a lease on the first ``num_blocks`` would add."""
        total = 0
        for segment in self.path(holder, group_id):
            if num_blocks is not None and segment.start >= num_blocks:
                break
            if holder in segment.deadlines and not segment.is_protected:
                total += segment.num_resident
                if num_blocks is not None and num_blocks < segment.end:
                    beyond = segment.block_ids[num_blocks - segment.start :]
                    total -= len(beyond) - beyond.count(NULL_BLOCK_ID)
        return total

    # --- changes --------------------------------------------------------------

    def hold(
        self,
        holder: Holder,
        group_id: GroupId,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[BlockId],
        num_blocks: int,
        *,
        deadline: float,
        num_leased: int | None = None,
    ) -> None:
        """Makes the holder hold the first ``num_blocks`` of ``hashes``.

        What it held beyond them it holds no longer.

        Args:
            holder: the context.
            group_id: its KV cache group.
            hashes: content, of at least ``num_blocks`` blocks.
            block_ids: where the first of them are, 0 for nowhere.
            num_blocks: how many to hold.
            deadline: lease of what is held from now on, 0 for none.
            num_leased: blocks the lease covers from the start, ``None`` for all.
        """
        common = self.common_length(holder, group_id, hashes, num_blocks)
        if common < self.length(holder, group_id):
            self.release(holder, group_id, start=common)
        if num_leased is None:
            num_leased = num_blocks
        parent: Segment | None = None
        position = 0
        while position < num_blocks:
            covered = position < num_leased
            stop = min(num_leased, num_blocks) if covered else num_blocks
            lease = deadline if covered else 0.0
            segment = self._child(parent, group_id, hashes[position])
            if segment is None:
                segment = self._grow(
                    parent, holder, group_id, hashes[position:stop], lease
                )
            else:
                end = position + _common(segment, hashes, stop)
                if end < segment.end:
                    segment = self._split(segment, end)
                self._join(segment, holder, lease)
            self._fill(segment, block_ids)
            parent, position = segment, segment.end
        if parent is not None:
            self._set_leaf(holder, group_id, parent)

    def set_deadline(
        self,
        holder: Holder,
        group_id: GroupId,
        deadline: float,
        *,
        num_blocks: int | None = None,
    ) -> None:
        """Leases the first ``num_blocks`` blocks (default all) until ``deadline``.

        What the holder has beyond them is held without a lease.
        """
        path = self.path(holder, group_id)
        # The prefix is the first to be given a lease and the last to lose it.
        for segment in path if deadline else reversed(path):
            if num_blocks is not None and segment.start < num_blocks < segment.end:
                upper = self._split(segment, num_blocks)
                self._set_deadline(upper, holder, deadline)
            covered = num_blocks is None or segment.end <= num_blocks
            self._set_deadline(segment, holder, deadline if covered else 0.0)

    def set_active(self, holder: Holder, num_active: int) -> None:
        """Sets how many requests of the holder run; at 0 it is at rest."""
        changes = (holder.num_active == 0) != (num_active == 0)
        holder.num_active = num_active
        if not changes:
            return
        for group_id in holder.leaves:
            for segment in self.path(holder, group_id):
                if segment.deadlines.get(holder):
                    segment.num_at_rest += 1 if num_active == 0 else -1
                    self._retention.refresh(segment)

    def set_resume(self, holder: Holder, resume_at: float) -> None:
        """Sets when the holder's next request is expected, 0 for no expectation."""
        holder.resume_at = resume_at
        for group_id in holder.leaves:
            # What is moved last is reused last.
            for segment in reversed(self.path(holder, group_id)):
                if holder in segment.deadlines:
                    segment.expect(holder, resume_at)
                    self._retention.refresh(segment)

    def release(
        self,
        holder: Holder,
        group_id: GroupId,
        *,
        start: int = 0,
        end: int | None = None,
        front: bool = False,
    ) -> int:
        """Ends the holder's claim on blocks ``[start, end)``; returns how many.

        Args:
            holder: the context.
            group_id: its KV cache group.
            start: first logical index given up.
            end: one past the last; ``None`` for all that follow, after which the
                context ends at ``start``.
            front: make what nobody else holds next to be reused.
        """
        num_released = 0
        path = self.path(holder, group_id)
        # What is moved last is reused last, unless it is moved to the front.
        for segment in path if front else reversed(path):
            if segment.start < start < segment.end:
                self._split(segment, start)
            if end is not None and segment.start < end < segment.end:
                segment = self._split(segment, end)
            inside = segment.start >= start and (end is None or segment.end <= end)
            if inside and holder in segment.deadlines:
                num_released += len(segment.hashes)
                self._leave(segment, holder, front=front)
        if end is None:
            self._cut_leaf(holder, group_id, start)
        return num_released

    def clear(self) -> None:
        """Forgets everything."""
        self._roots.clear()
        self.num_records = self.num_blocks = 0

    # --- internals ------------------------------------------------------------

    def _child(
        self, parent: Segment | None, group_id: GroupId, block_hash: BlockHash
    ) -> Segment | None:
        if parent is None:
            return self._roots.get((group_id, block_hash))
        return parent.children.get(block_hash)

    def _grow(
        self,
        parent: Segment | None,
        holder: Holder,
        group_id: GroupId,
        added: Sequence[BlockHash],
        deadline: float,
    ) -> Segment:
        """Adds blocks below ``parent``, in place where nobody else is concerned."""
        self.num_blocks += len(added)
        if (
            parent is not None
            and not parent.children
            and len(parent.deadlines) == 1
            and parent.deadlines.get(holder) == deadline
            and parent.num_leaves == (holder.leaves.get(group_id) is parent)
        ):
            parent.hashes.extend(added)
            parent.block_ids.extend([NULL_BLOCK_ID] * len(added))
            self.num_records += len(added)
            return parent
        segment = Segment(group_id, parent, 0 if parent is None else parent.end)
        segment.hashes.extend(added)
        segment.block_ids.extend([NULL_BLOCK_ID] * len(added))
        if parent is None:
            self._roots[group_id, added[0]] = segment
        else:
            parent.children[added[0]] = segment
        self._join(segment, holder, deadline)
        return segment

    def _fill(self, segment: Segment, block_ids: Sequence[BlockId]) -> None:
        """Records resident copies where none is recorded; the rest costs nothing."""
        recorded, start = segment.block_ids, segment.start
        stop = min(len(recorded), len(block_ids) - start)
        if segment.num_resident == len(recorded) or stop <= 0:
            return
        # A growing context has its new blocks at the end.
        low = segment.num_resident
        if recorded[low:].count(NULL_BLOCK_ID) != len(recorded) - low:
            low = 0
        found: Sequence[int] = range(low, stop)
        ids = list(block_ids[start + low : start + stop])
        if (low == 0 and segment.num_resident) or NULL_BLOCK_ID in ids:
            wanted = [
                recorded[offset] == NULL_BLOCK_ID and block_id != NULL_BLOCK_ID
                for offset, block_id in zip(found, ids, strict=True)
            ]
            found = list(itertools.compress(found, wanted))
            ids = list(itertools.compress(ids, wanted))
        if found:
            # Tail first: what is put into the free list is taken in this order.
            self._retention.attach(segment, found[::-1], ids[::-1])

    def _split(self, segment: Segment, at: int) -> Segment:
        upper = self._retention.split(segment, at)
        if upper.parent is None:
            self._roots[upper.group_id, upper.hashes[0]] = upper
        else:
            upper.parent.children[upper.hashes[0]] = upper
        return upper

    def _join(self, segment: Segment, holder: Holder, deadline: float) -> None:
        if holder not in segment.deadlines:
            self.num_records += len(segment.hashes)
            if not any(other in segment.deadlines for other in holder.siblings):
                segment.num_sessions += 1
            segment.expect(holder, holder.resume_at)
        self._set_deadline(segment, holder, deadline, joining=True)

    def _set_deadline(
        self, segment: Segment, holder: Holder, deadline: float, joining: bool = False
    ) -> None:
        old = segment.deadlines.get(holder)
        if old is None and not joining:
            return
        segment.deadlines[holder] = deadline
        segment.num_at_rest += _rests(holder, deadline) - _rests(holder, old)
        _update_latest(segment, old, deadline)
        self._retention.refresh(segment)

    def _leave(self, segment: Segment, holder: Holder, *, front: bool) -> None:
        deadline = segment.deadlines.pop(holder)
        self.num_records -= len(segment.hashes)
        if not any(other in segment.deadlines for other in holder.siblings):
            segment.num_sessions -= 1
        segment.num_at_rest -= _rests(holder, deadline)
        segment.expect(holder, 0.0)
        _update_latest(segment, deadline, None)
        self._retention.refresh(segment, front=front, num_own_users=holder.num_active)
        self._prune(segment)

    def _prune(self, segment: Segment) -> None:
        """Takes segments nobody holds out of the tree, up to one that matters.

        One where a context ends stays: the context still is what it is after its
        claims on the end of it were given up.
        """
        node: Segment | None = segment
        while node is not None and not (
            node.deadlines or node.children or node.num_leaves
        ):
            self.num_blocks -= len(node.hashes)
            if node.parent is None:
                self._roots.pop((node.group_id, node.hashes[0]), None)
            else:
                node.parent.children.pop(node.hashes[0], None)
            node = node.parent

    def _cut_leaf(self, holder: Holder, group_id: GroupId, end: int) -> None:
        """Makes the deepest segment the holder still has its leaf."""
        leaf = holder.leaves.get(group_id)
        while leaf is not None and (leaf.end > end or holder not in leaf.deadlines):
            leaf = leaf.parent
        self._set_leaf(holder, group_id, leaf)

    def _set_leaf(
        self, holder: Holder, group_id: GroupId, leaf: Segment | None
    ) -> None:
        old = holder.leaves.get(group_id)
        if leaf is not None:
            holder.leaves[group_id] = leaf
            leaf.num_leaves += 1
        elif old is not None:
            del holder.leaves[group_id]
        if old is not None:
            old.num_leaves -= 1
            self._prune(old)

    def segments(self) -> Iterator[Segment]:
        """Every segment in the tree. O(segments): for tests."""
        stack = list(self._roots.values())
        while stack:
            segment = stack.pop()
            yield segment
            stack.extend(segment.children.values())

    def check_integrity(self, holders: Sequence[Holder]) -> None:
        segments = list(self.segments())
        records = 0
        for segment in segments:
            sessions = {id(holder.siblings) for holder in segment.deadlines}
            if len(sessions) != segment.num_sessions:
                raise IntegrityError(f"{len(sessions)} sessions hold a segment")
            deadlines = list(segment.deadlines.values())
            if segment.expire_at != max(deadlines, default=0.0):
                raise IntegrityError("segment has the wrong deadline")
            if segment.num_at_rest != sum(
                _rests(holder, deadline)
                for holder, deadline in segment.deadlines.items()
            ):
                raise IntegrityError("segment has the wrong number of holders at rest")
            if segment.num_latest != deadlines.count(segment.expire_at):
                raise IntegrityError("segment has the wrong number of latest holders")
            expected = segment.expectations
            if (expected.moments if expected else {}) != {
                holder: holder.resume_at
                for holder in segment.deadlines
                if holder.resume_at
            }:
                raise IntegrityError("segment has the wrong expectations")
            if not (segment.deadlines or segment.children or segment.num_leaves):
                raise IntegrityError("segment is held by nobody")
            for block_hash, child in segment.children.items():
                if child.parent is not segment or child.start != segment.end:
                    raise IntegrityError("child does not continue its parent")
                if child.hashes[0] != block_hash:
                    raise IntegrityError("child is filed under the wrong hash")
            records += len(segment.hashes) * len(segment.deadlines)
        if records != self.num_records:
            raise IntegrityError(f"{records} records, counted {self.num_records}")
        num_blocks = sum(len(segment.hashes) for segment in segments)
        if num_blocks != self.num_blocks:
            raise IntegrityError(f"{num_blocks} blocks, counted {self.num_blocks}")
        num_leaves = dict.fromkeys(segments, 0)
        for holder in holders:
            for leaf in holder.leaves.values():
                if leaf not in num_leaves:
                    raise IntegrityError("a context's leaf is not in the tree")
                num_leaves[leaf] += 1
        for segment, count in num_leaves.items():
            if segment.num_leaves != count:
                raise IntegrityError(f"{count} contexts end in a segment")
        self._retention.check_integrity(segments)


def _rests(holder: Holder, deadline: float | None) -> bool:
    """Whether a deadline of the holder's counts as protection."""
    return bool(deadline) and holder.num_active == 0


def _update_latest(segment: Segment, old: float | None, new: float | None) -> None:
    """Keeps ``expire_at`` when a holder's deadline changes, comes or goes.

    Looks at all holders only when the last one with the latest deadline is gone: a
    prefix that thousands of sessions share loses them one by one in O(1).
    """
    if old is not None and old == segment.expire_at:
        segment.num_latest -= 1
    if new is not None and new > segment.expire_at:
        segment.expire_at, segment.num_latest = new, 1
    elif new is not None and new == segment.expire_at:
        segment.num_latest += 1
    if segment.num_latest == 0 and segment.expire_at > 0.0:
        deadlines = segment.deadlines.values()
        segment.expire_at = max(deadlines, default=0.0)
        segment.num_latest = sum(d == segment.expire_at for d in deadlines)


def _common(segment: Segment, hashes: Sequence[BlockHash], num_blocks: int) -> int:
    """Leading blocks of ``segment`` that ``hashes`` has at the same index.

    Equal hashes have equal predecessors, so a binary search finds the first
    difference, and one comparison settles the common case.
    """
    size = min(segment.end, num_blocks) - segment.start
    if size <= 0:
        return 0
    own, start = segment.hashes, segment.start
    if own[size - 1] == hashes[start + size - 1]:
        return size
    return bisect_left(range(size), True, key=lambda i: own[i] != hashes[start + i])
