from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from sam_connector.transfer.layout import (
    Descriptors,
    IntArray,
    RegionTable,
    SlotLayout,
    build_descriptors,
    merge_runs,
    slice_bytes,
    split_by_bytes,
)

POOL_BASE = 1 << 40


def _region(num_blocks: int, block_bytes: int, *, stride: int = 0) -> torch.Tensor:
    stride = stride or block_bytes
    memory = torch.zeros(num_blocks * stride, dtype=torch.uint8)
    return memory.as_strided((num_blocks, block_bytes), (stride, 1))


def test_a_record_is_the_regions_parts_one_after_another() -> None:
    layout = SlotLayout.of({0: [_region(4, 100), _region(4, 7), _region(4, 50)]})
    assert layout.sizes == {0: (100, 7, 50)}
    assert layout.offsets == {0: (0, 100, 107)}
    assert layout.record_bytes(0) == 157
    assert layout.slot_bytes == 192


def test_a_slot_holds_the_largest_groups_record() -> None:
    layout = SlotLayout.of({3: [_region(4, 64)], 1: [_region(9, 128), _region(9, 128)]})
    assert layout.slot_bytes == 256
    assert layout.record_bytes(3) == 64
    assert layout.record_bytes(1) == 256


def test_rows_may_be_further_apart_than_they_are_long() -> None:
    assert SlotLayout.of({0: [_region(4, 100, stride=300)]}).sizes == {0: (100,)}


def test_a_single_block_has_no_stride_to_be_wrong() -> None:
    region = torch.zeros(64, dtype=torch.uint8).as_strided((1, 64), (1, 1))
    assert SlotLayout.of({0: [region]}).slot_bytes == 64


BAD_REGIONS = {
    "dtype": (torch.zeros(4, 8, dtype=torch.int8), "int8"),
    "one_dimension": (torch.zeros(8, dtype=torch.uint8), r"\(8,\)"),
    "three_dimensions": (torch.zeros(4, 2, 8, dtype=torch.uint8), "num_blocks"),
    "no_blocks": (torch.zeros(0, 8, dtype=torch.uint8), "empty"),
    "no_bytes": (torch.zeros(8, 0, dtype=torch.uint8), "empty"),
    "bytes_apart": (torch.zeros(8, 4, dtype=torch.uint8).T, "apart"),
    "blocks_overlap": (
        torch.zeros(64, dtype=torch.uint8).as_strided((4, 16), (8, 1)),
        "overlap",
    ),
}


@pytest.mark.parametrize(
    ("region", "message"), BAD_REGIONS.values(), ids=BAD_REGIONS.keys()
)
def test_a_region_of_another_form_is_named(region: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"group 2, region 1: .*{message}"):
        SlotLayout.of({2: [_region(4, 8), region]})


def test_groups_without_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="no KV cache group"):
        SlotLayout.of({})
    with pytest.raises(ValueError, match="group 4 has no regions"):
        SlotLayout.of({0: [_region(4, 8)], 4: []})


def test_regions_of_one_group_have_the_same_blocks() -> None:
    with pytest.raises(ValueError, match=r"group 0: .*num_blocks: \[4, 5\]"):
        SlotLayout.of({0: [_region(4, 8), _region(5, 8)]})


def test_regions_of_one_group_lie_on_one_device() -> None:
    elsewhere = torch.zeros(4, 8, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="several devices"):
        SlotLayout.of({0: [_region(4, 8), elsewhere]})


def _table(rows: Sequence[tuple[int, int, int]], num_blocks: int = 50) -> RegionTable:
    """Regions as (base, stride, size); parts one after another."""
    sizes = [size for _, _, size in rows]
    return RegionTable(
        num_blocks=num_blocks,
        bases=_ints([base for base, _, _ in rows]),
        strides=_ints([stride for _, stride, _ in rows]),
        sizes=_ints(sizes),
        offsets=_ints([sum(sizes[:index]) for index in range(len(sizes))]),
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _merged(
    table: RegionTable, block_ids: Sequence[int], slots: Sequence[int], slot_bytes: int
) -> Descriptors:
    return merge_runs(
        build_descriptors(
            table,
            _ints(block_ids),
            _ints(slots),
            pool_base=POOL_BASE,
            slot_bytes=slot_bytes,
        )
    )


def _bytes_of(descriptors: Descriptors) -> dict[int, int]:
    """Host address to device address, byte by byte."""
    pairs = {}
    for device, host, size in zip(
        descriptors.device.tolist(),
        descriptors.host.tolist(),
        descriptors.sizes.tolist(),
        strict=True,
    ):
        assert size > 0
        for index in range(size):
            assert host + index not in pairs
            pairs[host + index] = device + index
    return pairs


def _naive(
    rows: Sequence[tuple[int, int, int]],
    block_ids: Sequence[int],
    slots: Sequence[int],
    slot_bytes: int,
) -> dict[int, int]:
    pairs = {}
    for block_id, slot in zip(block_ids, slots, strict=True):
        cursor = POOL_BASE + slot * slot_bytes
        for base, stride, size in rows:
            for index in range(size):
                pairs[cursor] = base + block_id * stride + index
                cursor += 1
    return pairs


@st.composite
def _copies(
    draw: st.DrawFn,
) -> tuple[list[tuple[int, int, int]], list[int], list[int], int]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    is_packed = draw(st.booleans())
    gap = draw(st.integers(0, 3))
    rows, base = [], 1000
    for size in sizes:
        stride = (sum(sizes) if is_packed else size) + gap
        rows.append((base, stride, size))
        base += size if is_packed else 5000
    num_copies = draw(st.integers(0, 12))
    ids = st.lists(
        st.integers(0, 49), min_size=num_copies, max_size=num_copies, unique=True
    )
    block_ids, slots = draw(ids), draw(ids)
    if draw(st.booleans()):
        block_ids, slots = sorted(block_ids), sorted(slots)
    if draw(st.booleans()):
        first = draw(st.integers(0, 20))
        block_ids = list(range(first, first + num_copies))
        slots = [block_id + 5 for block_id in block_ids]
    return rows, block_ids, slots, sum(sizes) + draw(st.sampled_from([0, 0, 7]))


@given(_copies())
def test_descriptors_cover_what_a_naive_copy_does(
    copies: tuple[list[tuple[int, int, int]], list[int], list[int], int],
) -> None:
    rows, block_ids, slots, slot_bytes = copies
    merged = _merged(_table(rows), block_ids, slots, slot_bytes)
    assert _bytes_of(merged) == _naive(rows, block_ids, slots, slot_bytes)


@given(_copies(), st.integers(1, 5), st.integers(1, 20))
def test_shares_cover_the_same_and_are_even(
    copies: tuple[list[tuple[int, int, int]], list[int], list[int], int],
    num_shares: int,
    min_bytes: int,
) -> None:
    rows, block_ids, slots, slot_bytes = copies
    merged = _merged(_table(rows), block_ids, slots, slot_bytes)
    shares = split_by_bytes(merged, num_shares, min_bytes=min_bytes)
    assert _bytes_of(Descriptors.concatenate(shares)) == _bytes_of(merged)
    assert 1 <= len(shares) <= num_shares
    sizes = [share.num_bytes for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert len(shares) == 1 or min(sizes) >= min_bytes


@given(_copies(), st.integers(0, 300), st.integers(0, 300))
def test_a_slice_is_those_bytes_of_the_list(
    copies: tuple[list[tuple[int, int, int]], list[int], list[int], int],
    one: int,
    other: int,
) -> None:
    rows, block_ids, slots, slot_bytes = copies
    merged = _merged(_table(rows), block_ids, slots, slot_bytes)
    start, end = (min(value, merged.num_bytes) for value in sorted((one, other)))
    everything = list(_bytes_of(merged).items())
    part = slice_bytes(merged, start, end)
    assert list(_bytes_of(part).items()) == everything[start:end]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_runs_become_one_copy_whatever_the_order_of_the_ids(order: list[int]) -> None:
    """Only where a region is dense and fills its slot."""
    block_ids, slots = [10 + step for step in order], [20 + step for step in order]
    merged = _merged(_table([(0, 64, 64)]), block_ids, slots, slot_bytes=64)
    assert (merged.device.tolist(), merged.host.tolist(), merged.sizes.tolist()) == (
        [640],
        [POOL_BASE + 20 * 64],
        [256],
    )


@pytest.mark.parametrize(
    ("rows", "slot_bytes", "num_copies"),
    [
        ([(0, 64, 64)], 128, 4),  # the slot is larger
        ([(0, 80, 64)], 64, 4),  # the blocks are apart
        ([(0, 64, 64), (9999, 64, 64)], 128, 8),  # two regions
        ([(0, 128, 64), (64, 128, 64)], 128, 1),  # two, next to each other
        ([(0, 130, 64), (64, 130, 64)], 128, 4),  # the same with gaps
    ],
)
def test_only_what_is_contiguous_on_both_sides_is_joined(
    rows: list[tuple[int, int, int]], slot_bytes: int, num_copies: int
) -> None:
    merged = _merged(_table(rows), [4, 5, 6, 7], [1, 2, 3, 4], slot_bytes)
    assert len(merged) == num_copies


def test_a_table_is_the_regions_addresses() -> None:
    regions = [_region(4, 100, stride=300), _region(4, 7)]
    table = RegionTable.of(regions, (0, 100))
    assert table.num_blocks == 4
    assert table.bases.tolist() == [region.data_ptr() for region in regions]
    assert table.strides.tolist() == [300, 7]
    assert table.sizes.tolist() == [100, 7]
    assert table.offsets.tolist() == [0, 100]


def test_addresses_stay_integers() -> None:
    merged = _merged(_table([((1 << 47) - 4096, 64, 64)]), [3], [2], 64)
    assert merged.device.dtype == np.int64
    assert merged.device.tolist() == [(1 << 47) - 4096 + 192]
