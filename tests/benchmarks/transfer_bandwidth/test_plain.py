from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth import plain
from benchmarks.transfer_bandwidth.plain import (
    plain_copy,
    plain_copy_both_ways,
    swap_blocks,
)
from benchmarks.transfer_bandwidth.rig import Ids
from sam_connector.transfer import Direction


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("piece_bytes", [None, 1000, 4096])
def test_all_bytes_are_copied(
    direction: Direction, num_threads: int, piece_bytes: int | None
) -> None:
    blocks, slots = _random(100_003), _random(100_003)
    source = blocks if direction is Direction.STORE else slots
    expected = source.clone()
    plain_copy(
        blocks, slots, direction, num_threads=num_threads, piece_bytes=piece_bytes
    )()
    assert torch.equal(blocks, expected)
    assert torch.equal(slots, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_half_of_the_bytes_go_each_way(num_threads: int) -> None:
    blocks, slots = _random(100_002), _random(100_002)
    first, second = blocks[:50_001].clone(), slots[50_001:].clone()
    plain_copy_both_ways(blocks, slots, num_threads=num_threads)()
    for memory in (blocks, slots):
        assert torch.equal(memory[:50_001], first)
        assert torch.equal(memory[50_001:], second)


@pytest.mark.parametrize("direction", Direction)
def test_swap_blocks_moves_the_blocks_that_are_named(direction: Direction) -> None:
    blocks, slots = _random(10, 64), _random(10, 64)
    expected = {name: each.clone() for name, each in (("b", blocks), ("s", slots))}
    if direction is Direction.STORE:
        expected["s"][[0, 7]] = expected["b"][[3, 9]]
    else:
        expected["b"][[3, 9]] = expected["s"][[0, 7]]
    copy, by = swap_blocks(blocks, slots, direction, Ids([3, 9], [0, 7]))
    copy()
    assert by == "torch"
    assert torch.equal(blocks, expected["b"])
    assert torch.equal(slots, expected["s"])


class _Stream:
    cuda_stream = 7
    is_waited_for = False

    def synchronize(self) -> None:
        self.is_waited_for = True


@pytest.mark.parametrize("direction", Direction)
def test_single_copies_are_one_call_for_each_block(
    monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """The driver's part is played by ``memmove``."""
    stream, calls = _Stream(), list[int]()

    def call(
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        *,
        access_order: int,
        stream: int,
    ) -> None:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))
            calls.append(stream)

    monkeypatch.setattr(plain, "load_single_copies", lambda: call)
    monkeypatch.setattr(plain._cuda, "current_stream", lambda: stream)
    blocks, slots = _random(10, 64), _random(10, 64)
    plain.single_copies(blocks, slots, direction, Ids([3, 9], [0, 7]))()
    assert torch.equal(blocks[[3, 9]], slots[[0, 7]])
    assert not torch.equal(blocks[0], slots[0])
    assert calls == [7, 7]
    assert stream.is_waited_for
