"""The list itself; its use in zones is in ``test_zoned_queue``."""

from __future__ import annotations

import pytest

from sam_connector.core.free_list import FreeList
from sam_connector.errors import IntegrityError
from tests.core.pool import FakeBlock


class Numbers(FreeList):
    """A list of blocks, all of them free."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = [FakeBlock(block_id) for block_id in range(num_blocks)]
        self._link_all(self.fake_free_list_tail, self.blocks)
        self.num_free_blocks = num_blocks

    @property
    def order(self) -> list[int]:
        self._check_links()
        return [block.block_id for block in self.get_all_free_blocks()]


def test_blocks_are_linked_in_the_order_given() -> None:
    numbers = Numbers(4)
    assert numbers.order == [0, 1, 2, 3]
    assert Numbers(0).order == []


def test_taken_blocks_are_on_no_list() -> None:
    numbers = Numbers(4)
    taken = numbers._unlink_first(3)
    assert [block.block_id for block in taken] == [0, 1, 2]
    assert not any(block.is_free for block in taken)
    assert numbers.order == [3]
    numbers._unlink_first(1)
    assert numbers.order == []


def test_a_chain_is_linked_before_any_block() -> None:
    numbers = Numbers(4)
    first, second = numbers._unlink_first(2)
    first.next_free_block, second.prev_free_block = second, first
    numbers._link_run(numbers.blocks[3], first, second)
    numbers.num_free_blocks += 2
    assert numbers.order == [2, 0, 1, 3]


def test_iteration_starts_after_the_cursor() -> None:
    numbers = Numbers(4)
    after = numbers.iter_blocks_after(numbers.blocks[1])
    assert [block.block_id for block in after] == [2, 3]
    numbers._unlink_first(1)
    assert list(numbers.iter_blocks_after(numbers.blocks[0])) == []


def test_a_broken_list_is_noticed() -> None:
    def break_back_link(numbers: Numbers) -> None:
        numbers.blocks[2].prev_free_block = None

    def break_tail(numbers: Numbers) -> None:
        numbers.fake_free_list_tail.prev_free_block = numbers.blocks[0]

    def break_count(numbers: Numbers) -> None:
        numbers.num_free_blocks += 1

    for damage in (break_back_link, break_tail, break_count):
        numbers = Numbers(4)
        damage(numbers)
        with pytest.raises(IntegrityError):
            numbers._check_links()
