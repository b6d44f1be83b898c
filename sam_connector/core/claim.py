"""What the free list knows of an owner of blocks."""

from __future__ import annotations

from typing import Any

from sam_connector.core.types import Zone


class Claim:
    """One owner's claim on any number of blocks, free or in use.

    Attributes:
        owner: passed to nobody but ``on_reassigned``'s listener.
        zone: where its free blocks are; A once the claim has ended.
        deadline: position in zone C.
        first: first free block of the run, ``None`` if there is none.
        last: last free block of the run.
        num_free: length of the run.
    """

    __slots__ = ("deadline", "first", "last", "num_free", "owner", "zone")

    def __init__(self, owner: Any, zone: Zone, deadline: float = 0.0) -> None:
        self.owner = owner
        self.zone = zone
        self.deadline = deadline
        self.first: Any = None
        self.last: Any = None
        self.num_free = 0


#: Marks a block in use whose content is dead: next in line once it is freed.
NEXT_IN_LINE = Claim(None, Zone.A)


def by_deadline(claim: Claim) -> float:
    """Sorts claims latest deadline first."""
    return -claim.deadline
