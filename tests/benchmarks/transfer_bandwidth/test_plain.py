from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth.plain import plain_copy
from sam_connector.transfer import Direction


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("piece_bytes", [None, 1000, 4096])
def test_all_bytes_are_copied(
    direction: Direction, num_threads: int, piece_bytes: int | None
) -> None:
    blocks, slots = (
        torch.randint(0, 256, (100_003,), dtype=torch.uint8) for _ in range(2)
    )
    source = blocks if direction is Direction.STORE else slots
    expected = source.clone()
    plain_copy(
        blocks, slots, direction, num_threads=num_threads, piece_bytes=piece_bytes
    )()
    assert torch.equal(blocks, expected)
    assert torch.equal(slots, expected)
