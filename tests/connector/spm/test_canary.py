"""Blocks that were not written are noticed, wherever the layout has them."""

from __future__ import annotations

import pytest
import torch

from sam_connector.connector.spm.canary import Canary

NUM_BLOCKS = 6
SHAPES = [
    (NUM_BLOCKS, 2, 4, 32),
    (NUM_BLOCKS, 1, 4, 2),
    (2 * NUM_BLOCKS, 4, 16),
]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def layers(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name in ("a", "b")}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_not_written_is_counted(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    caches = layers(shape, dtype)
    canary = Canary(caches, NUM_BLOCKS)
    if shape[-1] * shape[-2] >= 16:
        assert canary.can_mark
    canary.mark([1, 4])
    assert canary.num_untouched([1, 4]) == 8
    parts = shape[0] // NUM_BLOCKS
    for cache in caches.values():
        cache[parts : 2 * parts] = 1
    assert canary.num_untouched([1, 4]) == 4
    assert canary.num_untouched([1]) == 0


def test_a_load_that_stops_half_way_is_noticed() -> None:
    caches = layers(SHAPES[0], torch.float32)
    canary = Canary(caches, NUM_BLOCKS)
    canary.mark([3])
    for cache in caches.values():
        cache[3, 0] = 1  # keys and no values
    assert canary.num_untouched([3]) == 2


def test_other_blocks_are_left_alone() -> None:
    caches = layers(SHAPES[0], torch.float32)
    Canary(caches, NUM_BLOCKS).mark([3])
    for cache in caches.values():
        cache[3] = 0
        assert not cache.any()


@pytest.mark.parametrize("shape", [(NUM_BLOCKS + 1, 2, 4, 32), (NUM_BLOCKS, 4)])
def test_a_layout_that_is_not_known_is_not_marked(shape: tuple[int, ...]) -> None:
    assert not Canary(layers(shape, torch.float32), NUM_BLOCKS).can_mark
    assert not Canary({}, NUM_BLOCKS).can_mark


def test_a_mark_left_behind_is_finite() -> None:
    caches = layers(SHAPES[0], torch.bfloat16)
    Canary(caches, NUM_BLOCKS).mark([2])
    assert all(torch.isfinite(cache).all() for cache in caches.values())
