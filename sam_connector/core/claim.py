"""What the free list knows of an owner of blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from sam_connector.core.types import Zone
from sam_connector.errors import IntegrityError


class Claim:
    """One owner's claim on any number of blocks, free or in use.

    Attributes:
        owner: passed to nobody but ``on_reassigned``'s listener.
        zone: where its free blocks are; A once the claim has ended.
        due_at: when the owner is due back, which is the position in zone C; in zone
            B the position among those with a time, 0 for none.
        first: first free block of the run, ``None`` if there is none.
        last: last free block of the run.
        num_free: length of the run.
        order: where the run is filed by time; ``None`` if it is placed by last use,
            or there is none.
    """

    __slots__ = ("due_at", "first", "last", "num_free", "order", "owner", "zone")

    def __init__(self, owner: Any, zone: Zone, due_at: float = 0.0) -> None:
        self.owner = owner
        self.zone = zone
        self.due_at = due_at
        self.first: Any = None
        self.last: Any = None
        self.num_free = 0
        self.order: DueOrder | None = None

    @property
    def is_timed(self) -> bool:
        """Whether its run is placed by time, and not by last use."""
        return self.zone is Zone.C or (self.due_at > 0.0 and self.zone is Zone.B)


#: Marks a block in use whose content is dead: next in line once it is freed.
NEXT_IN_LINE = Claim(None, Zone.A)


def by_due(claim: Claim) -> float:
    """Sorts claims due back latest first."""
    return -claim.due_at


class DueOrder:
    """Claims with a run that are placed by time: due back latest first.

    Attributes:
        claims: in the order in which they are given up.
    """

    __slots__ = ("claims",)

    def __init__(self) -> None:
        self.claims: list[Claim] = []

    def add(self, claim: Claim, end: Any) -> Any:
        """Files a claim; returns the block that follows its run, ``end`` if none.

        Equal times keep the order of arrival, in which a context's tail comes
        before its prefix.
        """
        claims = self.claims
        claim.order = self
        position = bisect_right(claims, -claim.due_at, key=by_due)
        claims.insert(position, claim)
        return claims[position + 1].first if position + 1 < len(claims) else end

    def add_beside(self, claim: Claim, known: Claim, *, before: bool) -> None:
        """Files a claim next to one of the same time."""
        claim.order = self
        self.claims.insert(self._position(known) + (not before), claim)

    def remove(self, claim: Claim) -> None:
        claim.order = None
        del self.claims[self._position(claim)]

    def _position(self, claim: Claim) -> int:
        first = bisect_left(self.claims, -claim.due_at, key=by_due)
        return self.claims.index(claim, first)

    def check_integrity(self, runs: list[Claim]) -> None:
        """Checks the order against the claims whose runs are on the list."""
        if runs != self.claims or runs != sorted(runs, key=by_due):
            raise IntegrityError("runs placed by time are out of order")
