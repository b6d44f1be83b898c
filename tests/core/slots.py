"""Short ways to say what lies in the slots of a tier."""

from __future__ import annotations

from collections.abc import Iterable

from sam_connector.core.slot_pool import Content, Slot, SlotPool
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import GroupId
from tests.core.builders import G0, chain


def contents(text: str, group_id: GroupId = G0) -> list[Content]:
    """What the blocks of a context hold, one letter a block."""
    return [(group_id, block_hash) for block_hash in chain(text)]


def blocks_of(
    text: str,
    context_id: int = 1,
    deadline: float = 0.0,
    resume_at: float = 0.0,
    groups: Iterable[GroupId] = (G0,),
) -> ContextBlocks:
    """A context as the manager describes it to a tier."""
    return ContextBlocks(
        block_hashes={group_id: chain(text) for group_id in groups},
        context_id=context_id,
        deadline=deadline,
        resume_at=resume_at,
    )


def put(pool: SlotPool, wanted: Iterable[Content]) -> list[Slot]:
    """Stores content as a copy does, and lets go of the slots, tail first."""
    wanted = list(wanted)
    slots = pool.allocate(len(wanted))
    for slot, content in zip(slots, wanted, strict=True):
        pool.publish(slot, content)
    pool.unpin(slots[::-1])
    return slots


def letters(slots: Iterable[Slot]) -> str:
    """The last letter of what each slot holds, ``_`` for none."""
    return "".join(
        "_" if slot.content is None else chr(slot.content[1][-1]) for slot in slots
    )


def in_line(pool: SlotPool) -> str:
    """Letters of the slots that nothing copies, next to be given up first."""
    return letters(pool.free_queue.get_all_free_blocks())
