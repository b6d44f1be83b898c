"""Slots of a memory tier below the engine's: which content is in which.

The counterpart of the engine's block pool for memory that we own. A slot holds one
block of one KV cache group. Slots that nothing is copying are on a
``ZonedFreeQueue``, with content or without, so that the tier gives up content in the
same order as the engine does: unclaimed, then held by a session, then leased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sam_connector.core.claim import Claim
from sam_connector.core.retention import BlockMetaUpdate
from sam_connector.core.types import BlockHash, BlockId, GroupId, Zone
from sam_connector.core.zoned_queue import ZonedFreeQueue
from sam_connector.errors import IntegrityError

#: What a slot holds: a block of one group.
Content = tuple[GroupId, BlockHash]


class Slot:
    """One slot; ``block_id`` counts from 1, since 0 means "no copy" everywhere.

    Attributes:
        content: what can be read from it; ``None`` while it is being written.
        num_pins: copies that read or write it.
    """

    __slots__ = (
        "block_id",
        "content",
        "next_free_block",
        "num_pins",
        "prev_free_block",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.content: Content | None = None
        self.num_pins = 0
        self.prev_free_block: Any = None
        self.next_free_block: Any = None

    @property
    def index(self) -> int:
        """Position in the tier's memory, from 0."""
        return self.block_id - 1


class SlotPool:
    """All slots of a tier. A ``BlockPoolPort``.

    Args:
        num_slots: its size.

    Attributes:
        blocks: slots by ``block_id``; the first stands for "no copy".
        free_queue: those that nothing copies.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.blocks = [Slot(block_id) for block_id in range(num_slots + 1)]
        self.free_queue = ZonedFreeQueue(self.blocks[1:], num_slots + 1)
        self._slots: dict[Content, Slot] = {}
        #: Content given up for other content.
        self.num_displaced = 0

    def __contains__(self, content: Content) -> bool:
        return content in self._slots

    @property
    def num_used(self) -> int:
        """Slots with content."""
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        return self.num_slots - self.free_queue.num_free_blocks

    def num_available(self, limit: int) -> int:
        """Slots that can be had without breaking a lease, at most ``limit``."""
        return self.free_queue.num_unleased(limit)

    def missing(self, contents: Iterable[Content]) -> list[Content]:
        """Those of ``contents`` that no slot holds, in their order."""
        return [content for content in contents if content not in self._slots]

    def num_leading(
        self, group_id: GroupId, hashes: Sequence[BlockHash], start: int, end: int
    ) -> int:
        """How many of ``hashes[start:end]`` slots hold, up to the first that is not."""
        slots = self._slots
        for index in range(start, end):
            if (group_id, hashes[index]) not in slots:
                return index - start
        return max(0, end - start)

    def get(self, content: Content) -> Slot | None:
        return self._slots.get(content)

    def allocate(self, num_slots: int) -> list[Slot]:
        """Takes slots, pinned and without content, from the front of the queue.

        Raises:
            ValueError: there are not so many; nothing changed.
        """
        slots: list[Slot] = self.free_queue.popleft_n(num_slots)
        for slot in slots:
            if slot.content is not None:
                del self._slots[slot.content]
                slot.content = None
                self.num_displaced += 1
            slot.num_pins = 1
        return slots

    def publish(self, slot: Slot, content: Content) -> None:
        """``slot`` holds ``content`` from now on; it stays pinned."""
        assert slot.content is None, slot.content
        assert slot.num_pins > 0
        if content not in self._slots:
            slot.content = content
            self._slots[content] = slot

    def pin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if not slot.num_pins:
                self.free_queue.remove(slot)
            slot.num_pins += 1

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Undoes one pin each; what comes first is given up first."""
        empty: list[Slot] = []
        filled: list[Slot] = []
        for slot in slots:
            assert slot.num_pins > 0, f"slot {slot.index} is not pinned"
            slot.num_pins -= 1
            if not slot.num_pins:
                (empty if slot.content is None else filled).append(slot)
        self.free_queue.prepend_n(empty)
        self.free_queue.append_n(filled)

    def forget(self, content: Content) -> None:
        """The content can no longer be trusted."""
        slot = self._slots.pop(content, None)
        if slot is not None:
            slot.content = None
            if slot.num_pins:
                self.free_queue.disown(slot)
            else:
                self.free_queue.remove(slot)
                self.free_queue.prepend_n([slot])

    def clear(self) -> None:
        """Forgets all content. Pins stay until the copies have ended. O(pool)."""
        for slot in self._slots.values():
            slot.content = None
        self._slots.clear()

    def contents(self) -> Iterator[Content]:
        return iter(self._slots)

    # --- BlockPoolPort ----------------------------------------------------------

    def update_block_meta(
        self,
        *,
        block_ids: Sequence[BlockId],
        expected_block_hashes: Sequence[BlockHash],
        group_id: GroupId,
        claim: Claim,
    ) -> list[BlockMetaUpdate]:
        slots = [self.blocks[block_id] for block_id in block_ids]
        updates = [
            BlockMetaUpdate.UPDATED
            if slot.content == (group_id, expected)
            else BlockMetaUpdate.STALE
            for slot, expected in zip(slots, expected_block_hashes, strict=True)
        ]
        self.free_queue.claim_all(
            [
                slot
                for slot, update in zip(slots, updates, strict=True)
                if update is BlockMetaUpdate.UPDATED
            ],
            claim,
        )
        return updates

    def reuse_when_freed(
        self, block_ids: Sequence[BlockId], *, num_own_users: int
    ) -> None:
        """Nothing: a context of a tier never runs."""

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if slots, index and queue disagree."""
        self.free_queue.check_integrity()
        free = {slot.block_id for slot in self.free_queue.get_all_free_blocks()}
        for slot in self.blocks[1:]:
            if (slot.block_id in free) != (slot.num_pins == 0):
                raise IntegrityError(f"slot {slot.index}: {slot.num_pins} pins")
            if slot.content is not None and self._slots.get(slot.content) is not slot:
                raise IntegrityError(f"slot {slot.index} is not indexed")
        for content, slot in self._slots.items():
            if slot.content != content:
                raise IntegrityError(f"slot {slot.index} holds something else")
        for slot in self.free_queue.get_all_free_blocks():
            claim = self.free_queue.claims[slot.block_id]
            claimed = claim is not None and claim.zone is not Zone.A
            if claimed and slot.content is None:
                raise IntegrityError(f"slot {slot.index} is claimed and empty")


__all__ = ["Content", "Slot", "SlotPool"]
