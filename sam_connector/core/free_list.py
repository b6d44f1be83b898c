"""The doubly linked list that both kinds of free queue are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sam_connector.errors import IntegrityError


class _Sentinel:
    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class FreeList:
    """Blocks linked through two attributes of their own.

    A block has ``block_id``, ``prev_free_block`` and ``next_free_block``, as vLLM's
    ``KVCacheBlock`` does; nothing is allocated per block. It is on the list exactly
    when its ``next_free_block`` is not ``None``.
    """

    def __init__(self) -> None:
        self.fake_free_list_head: Any = _Sentinel()
        self.fake_free_list_tail: Any = _Sentinel()
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.num_free_blocks = 0

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks in allocation order. O(n): for tests and set-up."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Free blocks in allocation order, after ``cursor`` if one is given."""
        block = (cursor or self.fake_free_list_head).next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def _unlink_first(self, n: int) -> list[Any]:
        """Takes ``n`` blocks off the front, all of them in zone A."""
        head = self.fake_free_list_head
        block = head.next_free_block
        popped = []
        for _ in range(n):
            popped.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        head.next_free_block = block
        block.prev_free_block = head
        self.num_free_blocks -= n
        return popped

    def _link_all(self, successor: Any, blocks: Sequence[Any]) -> None:
        last = successor.prev_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = successor
        successor.prev_free_block = last

    def _link_run(self, successor: Any, first: Any, last: Any) -> None:
        predecessor = successor.prev_free_block
        first.prev_free_block = predecessor
        predecessor.next_free_block = first
        last.next_free_block = successor
        successor.prev_free_block = last

    def _check_links(self) -> None:
        """Walks the list; raises ``IntegrityError`` if a link or the count is off."""
        previous, num_free = self.fake_free_list_head, 0
        for block in self.iter_blocks_after(None):
            if block.prev_free_block is not previous:
                raise IntegrityError(f"block {block.block_id}: broken back link")
            previous = block
            num_free += 1
        if self.fake_free_list_tail.prev_free_block is not previous:
            raise IntegrityError("broken tail link")
        if num_free != self.num_free_blocks:
            raise IntegrityError(f"{num_free} free, counted {self.num_free_blocks}")
