"""The free list in three zones: one linked list with two boundaries.

    head -> [A: unclaimed] -> [B: held by a session] -> [C: under a deadline] -> tail

Blocks are taken from the front. While no block is claimed, every operation does
exactly what vLLM's own ``FreeKVCacheBlockQueue`` does, in the same order and at
the same cost; the zones cost a look only at blocks that a session holds.

Like vLLM's queue this manipulates two attributes of the given nodes and allocates
nothing. A node is on the list exactly when ``next_free_block`` is not ``None``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from sam_connector.core.types import Zone
from sam_connector.errors import IntegrityError


class FreeNode(Protocol):
    """What the list needs of a block; vLLM's ``KVCacheBlock`` fits."""

    block_id: int
    prev_free_block: Any
    next_free_block: Any


class Placement:
    """Where free blocks of one owner belong; shared by all of them.

    Immutable: an owner whose zone changes gets a new placement, and its free
    blocks are moved over one by one. That way the zone a linked block sits in is
    always the zone of its placement.

    Attributes:
        zone: zone of the list.
        owner: who to tell when such a block is handed out.
    """

    __slots__ = ("owner", "zone")

    def __init__(self, zone: Zone, owner: Any) -> None:
        self.zone = zone
        self.owner = owner


#: Marks a block in use whose content is dead: next in line once it is freed.
_NEXT_IN_LINE = Placement(Zone.A, None)


class _Sentinel:
    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


def _ignore_shortage(num_missing: int) -> None:
    """Default of ``ZonedFreeQueue.on_shortage``."""


def _ignore_reassigned(node: Any, placement: Placement) -> None:
    """Default of ``ZonedFreeQueue.on_reassigned``."""


class ZonedFreeQueue:
    """Free blocks in allocation order.

    Args:
        nodes: the free nodes, first to be allocated first.
        num_blocks: size of the pool; every ``block_id`` is below it.
        watch_all: report reassignment of claimed blocks in zone A too, which
            happens only in shadow mode.

    Attributes:
        placements: the placement of every block by id, ``None`` if unclaimed.
            Written by the owner of the claims through ``set_placement``.
        on_shortage: called with the number of blocks missing in zone A before
            zone B is touched, so that the owner can move what has expired.
        on_reassigned: called with each claimed node that is handed out.
    """

    def __init__(
        self, nodes: Sequence[Any], num_blocks: int, *, watch_all: bool = False
    ) -> None:
        self.fake_free_list_head: Any = _Sentinel()
        self.fake_free_list_tail: Any = _Sentinel()
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0
        self.placements: list[Placement | None] = [None] * num_blocks
        self.on_shortage: Callable[[int], None] = _ignore_shortage
        self.on_reassigned: Callable[[Any, Placement], None] = _ignore_reassigned
        self._watch_all = watch_all
        #: Blocks with a placement, free or in use: zero means stock behaviour.
        self._num_placed = 0
        #: Free blocks in zones B and C together.
        self._num_retained = 0
        #: First node of zone B, or of C if B is empty, or the tail.
        self._first_b: Any = self.fake_free_list_tail
        #: First node of zone C, or the tail.
        self._first_c: Any = self.fake_free_list_tail
        self.append_n(list(nodes))

    # --- what vLLM's block pool calls ---------------------------------------

    def popleft(self) -> Any:
        """Takes the first block; raises ``ValueError`` if there is none."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Takes the first ``n`` blocks: A, then B, then C.

        Raises:
            ValueError: ``n`` is negative or exceeds what is free; nothing changed.
        """
        if n == 0:
            return []
        if not 0 < n <= self.num_free_blocks:
            raise ValueError(f"cannot take {n} of {self.num_free_blocks} free blocks")
        if self._num_retained:
            missing = n - (self.num_free_blocks - self._num_retained)
            if missing > 0:
                self.on_shortage(missing)
                missing = n - (self.num_free_blocks - self._num_retained)
                if missing > 0:
                    return self._pop_retained(n)
        popped = self._unlink_first(n)
        if self._watch_all and self._num_placed:
            self._report_reassigned(popped)
        return popped

    def remove(self, block: Any) -> None:
        """Takes ``block`` out of the middle of the list.

        Raises:
            RuntimeError: the block is not on the list.
        """
        prev_block = block.prev_free_block
        next_block = block.next_free_block
        if prev_block is None or next_block is None:
            raise RuntimeError(f"remove() called on a block not on the list: {block}")
        if self._num_retained:
            placement = self.placements[block.block_id]
            if placement is not None and placement.zone:
                self._num_retained -= 1
                if block is self._first_b:
                    self._first_b = next_block
                if block is self._first_c:
                    self._first_c = next_block
        prev_block.next_free_block = next_block
        next_block.prev_free_block = prev_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Puts ``block`` at the end of its zone."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Puts ``blocks`` at the end of their zones, keeping their order."""
        if not blocks:
            return
        if self._num_placed:
            self._append_placed(blocks)
        else:
            self._link_before(self.fake_free_list_tail, blocks)
            self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Puts ``blocks``, whose content is worthless, at the very front."""
        if not blocks:
            return
        if self._num_placed:
            for block in blocks:
                if self.placements[block.block_id] is not None:
                    # Its content is gone without having been reassigned (a reset,
                    # an invalidated block): nobody holds it any more.
                    self._report_reassigned([block])
        self._link_front(blocks)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks in allocation order. O(n): for tests and set-up."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks in allocation order, after ``cursor`` if one is given."""
        node = (cursor or self.fake_free_list_head).next_free_block
        while node is not None and node is not self.fake_free_list_tail:
            yield node
            node = node.next_free_block

    # --- what the owner of the claims calls ---------------------------------

    @property
    def num_unclaimed(self) -> int:
        """Free blocks in zone A."""
        return self.num_free_blocks - self._num_retained

    def set_placement(self, block: Any, placement: Placement | None) -> None:
        """Changes where ``block`` belongs and, if it is free, moves it there.

        O(1). A free block that changes zones goes to the end of its new one.
        """
        old = self.placements[block.block_id]
        old_zone = Zone.A if old is None else old.zone
        new_zone = Zone.A if placement is None else placement.zone
        moves = old_zone is not new_zone and block.next_free_block is not None
        if moves:
            self.remove(block)
        self._place(block, placement)
        if moves:
            self.append(block)

    def next_in_line(self, block: Any, *, when_freed: bool) -> None:
        """Ends the claim on ``block`` and makes it the next one handed out.

        A block in use stays untouched; with ``when_freed`` it goes to the front
        once its user lets go of it, otherwise it will be an ordinary free block.
        """
        if block.next_free_block is not None:
            self.remove(block)
            self._place(block, None)
            self._link_front([block])
            self.num_free_blocks += 1
        else:
            self._place(block, _NEXT_IN_LINE if when_freed else None)

    def unclaim_all(self) -> None:
        """Makes every block ordinary, keeping the order of the list. O(pool)."""
        self.placements = [None] * len(self.placements)
        self._num_placed = self._num_retained = 0
        self._first_b = self._first_c = self.fake_free_list_tail

    def detach(self) -> None:
        """Becomes an ordinary free list again: no claims, no listeners."""
        self.unclaim_all()
        self.on_shortage = _ignore_shortage
        self.on_reassigned = _ignore_reassigned

    # --- linking -------------------------------------------------------------

    def _place(self, block: Any, placement: Placement | None) -> None:
        old = self.placements[block.block_id]
        self._num_placed += (placement is not None) - (old is not None)
        self.placements[block.block_id] = placement

    def _unlink_first(self, n: int) -> list[Any]:
        """Takes ``n`` nodes off the front; no boundary is crossed."""
        head = self.fake_free_list_head
        node = head.next_free_block
        popped = []
        for _ in range(n):
            popped.append(node)
            following = node.next_free_block
            node.prev_free_block = node.next_free_block = None
            node = following
        head.next_free_block = node
        node.prev_free_block = head
        self.num_free_blocks -= n
        return popped

    def _pop_retained(self, n: int) -> list[Any]:
        popped = self._unlink_first(self.num_unclaimed)
        head = self.fake_free_list_head
        while len(popped) < n:
            node = head.next_free_block
            self.remove(node)
            popped.append(node)
        self._report_reassigned(popped)
        return popped

    def _report_reassigned(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            placement = self.placements[node.block_id]
            if placement is not None:
                self._place(node, None)
                if placement.owner is not None:
                    self.on_reassigned(node, placement)

    def _link_before(self, successor: Any, blocks: Sequence[Any]) -> None:
        last = successor.prev_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = successor
        successor.prev_free_block = last

    def _link_front(self, blocks: Sequence[Any]) -> None:
        self._link_before(self.fake_free_list_head.next_free_block, blocks)

    def _append_placed(self, blocks: Sequence[Any]) -> None:
        """Appends runs of equally placed blocks, each to the end of its zone.

        One pass that links as it looks: this is the hot path of a completion.
        """
        placements = self.placements
        first = last = blocks[0]
        current = placements[first.block_id]
        start = 0
        for block in itertools.islice(blocks, 1, None):
            placement = placements[block.block_id]
            if placement is current:
                block.prev_free_block = last
                last.next_free_block = block
            else:
                length = blocks.index(block, start) - start
                self._close_run(first, last, length, current)
                start += length
                current, first = placement, block
            last = block
        self._close_run(first, last, len(blocks) - start, current)

    def _close_run(
        self, first: Any, last: Any, length: int, placement: Placement | None
    ) -> None:
        """Links the chain ``first`` .. ``last`` into the zone it belongs to."""
        if placement is _NEXT_IN_LINE:
            successor = self.fake_free_list_head.next_free_block
            node = first
            for _ in range(length):
                self._place(node, None)
                node = node.next_free_block
        elif placement is None or placement.zone is Zone.A:
            successor = self._first_b
        elif placement.zone is Zone.B:
            successor = self._first_c
        else:
            successor = self.fake_free_list_tail
        self.num_free_blocks += length
        if placement is not None and placement.zone is not Zone.A:
            self._num_retained += length
            if self._first_b is successor:
                self._first_b = first
            if placement.zone is Zone.C and self._first_c is successor:
                self._first_c = first
        predecessor = successor.prev_free_block
        first.prev_free_block = predecessor
        predecessor.next_free_block = first
        last.next_free_block = successor
        successor.prev_free_block = last

    def check_integrity(self) -> None:
        """Walks the list: links, counts, zone order. O(pool)."""
        zone, counts = Zone.A, [0, 0, 0]
        previous = self.fake_free_list_head
        for node in self.iter_blocks_after(None):
            if node.prev_free_block is not previous:
                raise IntegrityError(f"block {node.block_id}: broken back link")
            placement = self.placements[node.block_id]
            node_zone = Zone.A if placement is None else placement.zone
            if node_zone < zone:
                raise IntegrityError(f"block {node.block_id}: {node_zone} after {zone}")
            if node_zone >= Zone.B > zone and node is not self._first_b:
                raise IntegrityError("boundary of zone B is off")
            if node_zone is Zone.C and zone is not Zone.C and node is not self._first_c:
                raise IntegrityError("boundary of zone C is off")
            zone = node_zone
            counts[zone] += 1
            previous = node
        if self.fake_free_list_tail.prev_free_block is not previous:
            raise IntegrityError("broken tail link")
        if sum(counts) != self.num_free_blocks or counts[1] + counts[2] != (
            self._num_retained
        ):
            raise IntegrityError(f"{counts} free, counted {self.num_free_blocks}")
        if not counts[2] and self._first_c is not self.fake_free_list_tail:
            raise IntegrityError("zone C is empty but has a boundary")
        if not counts[1] and self._first_b is not self._first_c:
            raise IntegrityError("zone B is empty but has a boundary")
        placed = sum(placement is not None for placement in self.placements)
        if placed != self._num_placed:
            raise IntegrityError(f"{placed} placed, counted {self._num_placed}")
