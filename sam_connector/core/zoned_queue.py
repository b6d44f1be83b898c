"""The free list in three zones: one linked list with two boundaries.

    head -> [A: unclaimed] -> [B: held by a session] -> [C: under a deadline] -> tail

Blocks are taken from the front. While no block is claimed, every operation does
exactly what vLLM's own ``FreeKVCacheBlockQueue`` does, in the same order and at
the same cost.

The free blocks of one claim are neighbours, a *run*, so that a claim changes zones
by splicing its run: in O(1), however many blocks it has. Inside the zones:

    A  vLLM's order: least recently used first.
    B  runs by last use, least recent first; then those whose owner has said when it
       will be back, latest first.
    C  runs by deadline, or by when the owner will be back, latest first: who is due
       back last is given up first.
       (With equal leases least recently used first would be the worst order for
       agents that take turns: everybody loses the cache just before coming back.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any

from sam_connector.core.claim import NEXT_IN_LINE, Claim, DueOrder
from sam_connector.core.free_list import FreeList
from sam_connector.core.types import Zone
from sam_connector.errors import IntegrityError


def _ignore(*_: object) -> None:
    """Default of the callbacks of ``ZonedFreeQueue``."""


class ZonedFreeQueue(FreeList):
    """Free blocks in allocation order.

    Args:
        blocks: the free blocks, first to be allocated first. A block has the
            attributes ``block_id``, ``prev_free_block`` and ``next_free_block``.
        num_blocks: size of the pool; every ``block_id`` is below it.
        enforce: whether claims have an effect on the order; if not, they are only
            watched (shadow mode).

    Attributes:
        enforce: as given.
        claims: the claim on every block by id. ``None`` and an ended claim mean the
            same. Written through ``claim``.
        on_shortage: called with the number of blocks missing in zone A before zone
            B is touched, so that what has expired can be given up first.
        on_reassigned: called with claimed blocks that are handed out, and their
            claim, after they have left it.
        on_reclaimed: called with a block that comes under another claim, and the one
            that it is still under.
        num_taken: blocks handed out so far.
    """

    def __init__(
        self, blocks: Sequence[Any], num_blocks: int, *, enforce: bool = True
    ) -> None:
        super().__init__()
        self.claims: list[Claim | None] = [None] * num_blocks
        self.on_shortage: Callable[[int], None] = _ignore
        self.on_reassigned: Callable[[Sequence[Any], Claim], None] = _ignore
        self.on_reclaimed: Callable[[Any, Claim], None] = _ignore
        self.enforce = enforce
        self.num_taken = 0
        #: Claims that have not ended, and blocks marked: zero means stock behaviour.
        self._num_claims = 0
        #: Free blocks in zones B and C together.
        self._num_retained = 0
        #: First block of zone B, or of C if B is empty, or the tail.
        self._first_b: Any = self.fake_free_list_tail
        #: First block of zone C, or the tail.
        self._first_c: Any = self.fake_free_list_tail
        #: Claims with a run in zone C.
        self._leased = DueOrder()
        #: Claims with a run in zone B whose owner has said when it will be back.
        self._expected = DueOrder()
        self._is_putting_back = False
        self.append_n(list(blocks))

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
        if (
            n == 1
            and self._num_retained < self.num_free_blocks
            and (self.enforce or not self._num_claims)
        ):
            # The rule while requests decode: one block, and zone A has it.
            head = self.fake_free_list_head
            block = head.next_free_block
            following = block.next_free_block
            head.next_free_block = following
            following.prev_free_block = head
            block.prev_free_block = block.next_free_block = None
            self.num_free_blocks -= 1
            self.num_taken += 1
            return [block]
        if n == 0:
            return []
        if not 0 < n <= self.num_free_blocks:
            raise ValueError(f"cannot take {n} of {self.num_free_blocks} free blocks")
        self.num_taken += n
        num_missing = n - self.num_free_blocks + self._num_retained
        if num_missing > 0:
            self.on_shortage(num_missing)
            num_missing = max(0, n - self.num_unclaimed)
        else:
            num_missing = 0
        popped = self._unlink_first(n - num_missing)
        if self._num_claims and not self.enforce:
            self._report_reassigned(popped)
        while len(popped) < n:
            popped += self._pop_from_run(n - len(popped))
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
            # Inlined: every block of a prefix hit comes through here.
            claim = self.claims[block.block_id]
            if claim is not None and (num_free := claim.num_free):
                self._num_retained -= 1
                claim.num_free = num_free - 1
                if block is claim.first:
                    self._behead_run(claim, next_block)
                elif block is claim.last:
                    claim.last = prev_block
        prev_block.next_free_block = next_block
        next_block.prev_free_block = prev_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Puts ``block`` where its claim says, or at the end of zone A."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Puts ``blocks`` where their claims say, keeping their order."""
        if not blocks:
            return
        if self._num_claims:
            self._append_claimed(blocks)
        else:
            self._link_all(self.fake_free_list_tail, blocks)
        self.num_free_blocks += len(blocks)

    @contextmanager
    def putting_back(self) -> Iterator[None]:
        """Blocks appended within come to the *front* of their claim's run.

        For blocks that were taken off the list for a while without being used: first
        in line before, first in line again.
        """
        self._is_putting_back = True
        try:
            yield
        finally:
            self._is_putting_back = False

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Puts ``blocks``, whose content is worthless, at the very front."""
        if not blocks:
            return
        if self._num_claims:
            # Content that is gone without having been handed out (a reset, an
            # invalidated block) is nobody's any more.
            self._report_reassigned(blocks)
        self._link_all(self.fake_free_list_head.next_free_block, blocks)
        self.num_free_blocks += len(blocks)

    # --- what the owner of the claims calls ---------------------------------

    @property
    def num_unclaimed(self) -> int:
        """Free blocks in zone A."""
        return self.num_free_blocks - self._num_retained

    def num_unleased(self, limit: int) -> int:
        """Free blocks outside zone C, counted no further than ``limit``."""
        num_blocks, block = self.num_unclaimed, self._first_b
        while num_blocks < limit and block is not self._first_c:
            claim = self.claims[block.block_id]
            assert claim is not None
            num_blocks += claim.num_free
            block = claim.last.next_free_block
        return min(num_blocks, limit)

    def retained(self) -> Iterator[Any]:
        """Free blocks in zones B and C, in the order in which they will be taken."""
        block = self._first_b
        while block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def open_claim(self, owner: Any, zone: Zone, due_at: float = 0.0) -> Claim:
        """A claim on no blocks yet."""
        self._num_claims += 1
        return Claim(owner, zone if self.enforce else Zone.A, due_at)

    def claim(self, block: Any, claim: Claim) -> None:
        """Puts ``block`` under ``claim``, ending any other; a free block moves."""
        old = self.claims[block.block_id]
        if old is not None and old is not claim and old.owner is not None:
            self.on_reclaimed(block, old)
        is_free = self.enforce and block.next_free_block is not None
        if is_free:
            self.remove(block)
        if old is NEXT_IN_LINE:
            self._num_claims -= 1
        self.claims[block.block_id] = claim
        if is_free:
            self.append(block)

    def claim_all(self, blocks: Sequence[Any], claim: Claim) -> None:
        """``claim`` for many blocks, most of them in use and of no claim."""
        claims = self.claims
        for block in blocks:
            block_id = block.block_id
            if block.next_free_block is None and claims[block_id] is None:
                claims[block_id] = claim
            else:
                self.claim(block, claim)

    def move_claim(self, claim: Claim, zone: Zone, due_at: float = 0.0) -> None:
        """Changes a claim's zone or time; its run moves along. O(log claims)."""
        if not self.enforce or (claim.zone is zone and claim.due_at == due_at):
            return
        run = self._extract_run(claim)
        claim.zone, claim.due_at = zone, due_at
        self._insert_run(claim, *run)

    def split_claim(
        self, claim: Claim, blocks: Sequence[Any], *, owner: Any, before: bool
    ) -> Claim:
        """Moves ``blocks`` to a new claim that is the equal of ``claim``.

        Args:
            claim: what the blocks are under now.
            blocks: any of them, in the order in which they are to be taken.
            owner: of the new claim.
            before: whether the new run precedes what is left of the old one.
        """
        split = self.open_claim(owner, claim.zone, claim.due_at)
        free = [block for block in blocks if block.next_free_block is not None]
        if claim.zone is Zone.A:  # shadow mode: nothing is where its claim says
            free = []
        for block in free:
            self.remove(block)
        for block in blocks:
            self._set_claim(block, split)
        if not free:
            return split
        self.num_free_blocks += len(free)
        if claim.first is None:
            for block in free:
                self._insert_run(split, block, block, 1)
            return split
        successor = claim.first if before else claim.last.next_free_block
        if before and successor is self._first_b:
            self._first_b = free[0]
        if before and successor is self._first_c:
            self._first_c = free[0]
        if claim.order is not None:
            claim.order.add_beside(split, claim, before=before)
        self._link_all(successor, free)
        split.first, split.last, split.num_free = free[0], free[-1], len(free)
        self._num_retained += len(free)
        return split

    def end_claim(self, claim: Claim, *, front: bool = False) -> None:
        """Ends a claim: its run becomes the end of zone A, or the front. O(1)."""
        self._num_claims -= 1
        claim.owner = None
        run = self._extract_run(claim)
        claim.zone = Zone.A
        if run[0] is not None:
            head = self.fake_free_list_head.next_free_block
            self._link_run(head if front else self._first_b, *run[:2])

    def disown(self, block: Any) -> None:
        """What a block in use holds is gone, and with it the claim on it."""
        self._report_reassigned([block])

    def reuse_when_freed(self, blocks: Sequence[Any]) -> None:
        """Marks blocks in use, of no claim, to be the next ones once they are freed."""
        claims, num_marked = self.claims, 0
        for block in blocks:
            if block.next_free_block is None:
                block_id = block.block_id
                num_marked += claims[block_id] is not NEXT_IN_LINE
                claims[block_id] = NEXT_IN_LINE
        self._num_claims += num_marked

    def unclaim_all(self) -> None:
        """Makes every block ordinary, keeping the order of the list. O(pool)."""
        self.claims = [None] * len(self.claims)
        self._num_claims = self._num_retained = 0
        self._first_b = self._first_c = self.fake_free_list_tail
        self._leased.claims.clear()
        self._expected.claims.clear()

    def detach(self) -> None:
        """Becomes an ordinary free list again: no claims, no listeners."""
        self.unclaim_all()
        self.on_shortage = _ignore
        self.on_reassigned = _ignore
        self.on_reclaimed = _ignore

    # --- claims and runs -------------------------------------------------------

    def _set_claim(self, block: Any, claim: Claim | None) -> None:
        old = self.claims[block.block_id]
        self._num_claims += (claim is NEXT_IN_LINE) - (old is NEXT_IN_LINE)
        self.claims[block.block_id] = claim

    def _report_reassigned(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            claim = self.claims[block.block_id]
            if claim is not None:
                self._set_claim(block, None)
                if claim.owner is not None:
                    self.on_reassigned([block], claim)

    def _pop_from_run(self, max_blocks: int) -> list[Any]:
        """Takes blocks off the first run, which is the first on the list."""
        claim = self.claims[self.fake_free_list_head.next_free_block.block_id]
        assert claim is not None
        num_taken = min(max_blocks, claim.num_free)
        self._num_retained -= num_taken
        claim.num_free -= num_taken
        taken = self._unlink_first(num_taken)
        # The boundaries still point at the first block of the run.
        self._behead_run(claim, self.fake_free_list_head.next_free_block)
        for block in taken:
            self.claims[block.block_id] = None
        self.on_reassigned(taken, claim)
        return taken

    def _behead_run(self, claim: Claim, next_block: Any) -> None:
        """The first blocks of a run, shorter by now, are unlinked."""
        if claim.first is self._first_b:
            self._first_b = next_block
        if claim.first is self._first_c:
            self._first_c = next_block
        if claim.num_free:
            claim.first = next_block
        else:
            if claim.order is not None:
                claim.order.remove(claim)
            claim.first = claim.last = None

    def _extract_run(self, claim: Claim) -> tuple[Any, Any, int]:
        """Unlinks a whole run; returns its ends and length."""
        first, last, length = claim.first, claim.last, claim.num_free
        if first is not None:
            following = last.next_free_block
            if first is self._first_b:
                self._first_b = following
            if first is self._first_c:
                self._first_c = following
            first.prev_free_block.next_free_block = following
            following.prev_free_block = first.prev_free_block
            if claim.order is not None:
                claim.order.remove(claim)
            self._num_retained -= length
            claim.first = claim.last = None
            claim.num_free = 0
        return first, last, length

    def _insert_run(self, claim: Claim, first: Any, last: Any, length: int) -> None:
        """Links the chain ``first`` .. ``last`` as the end of the claim's run."""
        if first is None:
            return
        if claim.order is not None:
            successor = claim.last.next_free_block
        elif not claim.is_timed:
            # Used just now: what is there already moves up with it.
            old_first, old_last, old_length = self._extract_run(claim)
            successor = self._end_of_used
            if self._first_b is successor:
                self._first_b = first if old_first is None else old_first
            if old_first is not None:
                self._link_run(successor, old_first, old_last)
                claim.first, claim.num_free = old_first, old_length
                self._num_retained += old_length
        else:
            if claim.zone is Zone.C:
                successor = self._leased.add(claim, self.fake_free_list_tail)
                is_first_c = self._first_c is successor
            else:
                successor = self._expected.add(claim, self._first_c)
                is_first_c = False
            if self._first_b is successor:
                self._first_b = first
            if is_first_c:
                self._first_c = first
        self._link_run(successor, first, last)
        if claim.first is None:
            claim.first = first
        claim.last = last
        claim.num_free += length
        self._num_retained += length

    @property
    def _end_of_used(self) -> Any:
        """What follows the runs that are placed by last use."""
        timed = self._expected.claims
        return timed[0].first if timed else self._first_c

    def _append_claimed(self, blocks: Sequence[Any]) -> None:
        """Appends blocks in chains of equal claims, linking while looking.

        The hot path of a completion, hence one pass without a function call.
        """
        claims = self.claims
        rest = iter(blocks)
        first = last = next(rest)
        current, num_linked = claims[first.block_id], 0
        for block in rest:
            if claims[block.block_id] is current:
                block.prev_free_block = last
                last.next_free_block = block
            else:
                num_seen = len(blocks) - 1 - length_hint(rest)
                self._append_chain(current, first, last, num_seen - num_linked)
                num_linked, current, first = num_seen, claims[block.block_id], block
            last = block
        self._append_chain(current, first, last, len(blocks) - num_linked)

    def _append_chain(
        self, claim: Claim | None, first: Any, last: Any, length: int
    ) -> None:
        if claim is NEXT_IN_LINE:
            block = first
            for _ in range(length):
                self._set_claim(block, None)
                block = block.next_free_block
            self._link_run(self.fake_free_list_head.next_free_block, first, last)
        elif claim is None or claim.zone is Zone.A:
            self._link_run(self._first_b, first, last)
        elif self._is_putting_back:
            self._insert_in_front(claim, first, last, length)
        else:
            self._insert_run(claim, first, last, length)

    def _insert_in_front(
        self, claim: Claim, first: Any, last: Any, length: int
    ) -> None:
        """Links the chain as the start of the claim's run, which stays where it is."""
        if claim.first is None and claim.is_timed:
            self._insert_run(claim, first, last, length)
            return
        successor = self._first_b if claim.first is None else claim.first
        if self._first_b is successor:
            self._first_b = first
        if claim.zone is Zone.C and self._first_c is successor:
            self._first_c = first
        self._link_run(successor, first, last)
        claim.first = first
        if claim.last is None:
            claim.last = last
        claim.num_free += length
        self._num_retained += length

    # --- self-check -------------------------------------------------------------

    def check_integrity(self) -> None:
        """Checks links, counts, and the order of zones and runs. O(pool)."""
        self._check_links()
        runs: list[Claim] = []
        boundaries = dict.fromkeys((Zone.B, Zone.C), self.fake_free_list_tail)
        zone, num_retained = Zone.A, 0
        for block in self.iter_blocks_after(None):
            claim = self.claims[block.block_id]
            block_zone = Zone.A if claim is None else claim.zone
            if block_zone < zone:
                raise IntegrityError(f"block {block.block_id} is behind zone {zone}")
            for passed in range(zone + 1, block_zone + 1):
                boundaries[Zone(passed)] = block
            zone = block_zone
            if claim is not None and block_zone is not Zone.A:
                num_retained += 1
                if not runs or runs[-1] is not claim:
                    if claim.first is not block:
                        raise IntegrityError(f"block {block.block_id}: torn run")
                    runs.append(claim)
        if (self._first_b, self._first_c) != (boundaries[Zone.B], boundaries[Zone.C]):
            raise IntegrityError("a boundary is off")
        lengths = sum(claim.num_free for claim in runs)
        if not num_retained == lengths == self._num_retained:
            raise IntegrityError(f"{num_retained} retained, counted {lengths}")
        timed = [claim for claim in runs if claim.is_timed]
        if runs[len(runs) - len(timed) :] != timed:
            raise IntegrityError("a run without a time is behind one with a time")
        self._expected.check_integrity([c for c in timed if c.zone is Zone.B])
        self._leased.check_integrity([c for c in timed if c.zone is Zone.C])
