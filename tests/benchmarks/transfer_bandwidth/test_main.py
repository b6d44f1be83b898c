from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth import __main__ as program
from benchmarks.transfer_bandwidth import measure
from benchmarks.transfer_bandwidth.measure import KIB, MIB, Settings, WrongBytesError
from sam_connector.transfer import Direction
from sam_connector.transfer.gather import GatherCopier
from sam_connector.transfer.layout import Descriptors, slice_bytes

SMALL = Settings(
    device=torch.device("cpu"),
    num_bytes=2 * MIB,
    repeats=2,
    num_threads=2,
    block_sizes=(16 * KIB, 256 * KIB),
)


def test_last_line_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "_settings", lambda options: SMALL)
    assert program.main(["--device", "cpu", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    rows = summary["rows"]
    assert len(rows) == len(lines) - 1
    idle = [row for row in rows if row["interpreter"] == "idle"]
    assert {(row["block_bytes"], row["ids"], row["direction"]) for row in idle} == {
        (size, ids, direction)
        for size in (16 * KIB, 256 * KIB)
        for ids in ("contiguous", "scattered")
        for direction in ("store", "load")
    }
    large = [row["ratio"] for row in idle if row["block_bytes"] >= 256 * KIB]
    assert summary["min_ratio_256k_and_above"] == min(large)
    assert {"torch", "cpu", "cores", "python", "wall_s"} <= set(summary)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_moved_is_much_larger_than_a_cache(device: str) -> None:
    for flags in ([], ["--quick"]):
        options = program._parser().parse_args(["--device", device, *flags])
        settings = program._settings(options)
        assert settings.device.type == device
        assert 2 * settings.num_bytes >= 128 * MIB
        assert all(settings.num_bytes % size == 0 for size in settings.block_sizes)


@pytest.mark.parametrize("broken", Direction)
def test_a_wrong_byte_is_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: Direction
) -> None:
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        if direction is broken:
            part = slice_bytes(part, 0, part.num_bytes - 1)
        real(self, part, direction)

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(WrongBytesError, match=broken.value):
        measure.measure(SMALL, note=lambda line: None)


def test_a_copy_that_fails_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        raise OSError(14, "bad address")

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(RuntimeError, match="bad address"):
        measure.measure(SMALL, note=lambda line: None)
