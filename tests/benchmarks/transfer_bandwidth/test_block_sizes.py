from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.transfer_bandwidth import block_sizes
from benchmarks.transfer_bandwidth.block_sizes import BUSY_BLOCK_BYTES, SizeRow
from benchmarks.transfer_bandwidth.rig import Arena, WrongBytesError
from benchmarks.transfer_bandwidth.settings import KIB, Settings
from sam_connector.transfer import Direction
from sam_connector.transfer.gather import GatherCopier
from sam_connector.transfer.layout import Descriptors, slice_bytes


def test_every_size_kind_of_ids_and_direction(settings: Settings) -> None:
    lines: list[object] = []
    rows = block_sizes.measure(Arena(settings), lines.append)
    assert rows == lines
    idle = [row for row in rows if row.interpreter == "idle"]
    assert [(row.block_bytes, row.ids, row.direction) for row in idle] == [
        (size, ids, direction)
        for size in (16 * KIB, 256 * KIB)
        for ids in ("contiguous", "scattered")
        for direction in ("store", "load")
    ]
    busy = [row for row in rows if row.interpreter == "busy"]
    assert [(row.block_bytes, row.direction) for row in busy] == [
        (BUSY_BLOCK_BYTES, "store"),
        (BUSY_BLOCK_BYTES, "load"),
    ]
    assert all(row.ratio > 0 and row.ratio_same_pieces > 0 for row in rows)
    assert {row.ratio_swap_blocks for row in rows} == {None}


@pytest.mark.parametrize("broken", Direction)
def test_a_wrong_byte_is_noticed(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, broken: Direction
) -> None:
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        if direction is broken:
            part = slice_bytes(part, 0, part.num_bytes - 1)
        real(self, part, direction)

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(WrongBytesError, match=broken.value):
        block_sizes.measure(Arena(settings), lambda line: None)


def test_a_line_has_the_comparison_that_only_a_gpu_has() -> None:
    row = SizeRow(
        block_bytes=16 * KIB,
        ids="scattered",
        direction="store",
        interpreter="idle",
        ratio=0.5,
        ratio_same_pieces=1.25,
        ratio_swap_blocks=3.75,
        swap_blocks_by="torch",
        engine_gb_per_s=1.0,
        plain_gb_per_s=2.0,
    )
    assert "3.75" in str(row)
