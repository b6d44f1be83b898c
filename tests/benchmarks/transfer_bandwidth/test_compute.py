from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from benchmarks.transfer_bandwidth import compute
from benchmarks.transfer_bandwidth.compute import Step, Work
from benchmarks.transfer_bandwidth.rig import Arena, Rig
from benchmarks.transfer_bandwidth.settings import Settings


@pytest.mark.timeout(60)
def test_every_kind_beside_copies_both_ways(settings: Settings) -> None:
    before = torch.get_num_threads()
    lines: list[object] = []
    rows = compute.measure(Arena(settings), lines.append)
    assert rows == lines
    assert [(row.kind, row.direction) for row in rows] == [
        ("arithmetic", "store"),
        ("arithmetic", "load"),
        ("arithmetic", "both"),
        ("memory", "both"),
        ("interpreter", "both"),
    ]
    assert all(row.alone_ms > 0 and row.beside_ms > 0 for row in rows)
    assert all(0 <= row.covered <= 1 for row in rows)
    assert torch.get_num_threads() == before


def test_as_many_steps_as_take_so_long() -> None:
    counts: list[int] = []

    def clock(step: Step, count: int) -> tuple[float, float]:
        counts.append(count)
        return 0.001 * count, 0.0

    work = Work.of("any", lambda: None, clock, target_s=0.06)
    assert work.count == 60
    assert work.run()[0] == pytest.approx(0.06)
    assert counts[-1] == 60


def test_one_step_at_least() -> None:
    assert Work.of("any", lambda: None, lambda _, n: (n, n), target_s=0.1).count == 1


class _Computing:
    """Takes twice as long while anything is copied."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def clock(self, step: Step, count: int) -> tuple[float, float]:
        return (2.0, 1.5) if self._rig._engine.num_in_flight else (1.0, 1.0)


def test_slower_is_what_takes_longer_beside_copies(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    with Arena(settings).rig(compute.BLOCK_BYTES) as rig:
        monkeypatch.setattr(compute, "COPY_AMPLY", 1e-3)
        work = Work("any", lambda: None, _Computing(rig).clock, 1)
        row = compute._row(rig, work, "both", compute._copies(rig)["both"] * 200)
    assert (row.alone_ms, row.beside_ms, row.slowdown) == (1000.0, 2000.0, 1.0)
    assert row.slowdown_cpu_time == 0.5
    assert row.covered == 1.0


def test_rounds_that_copies_did_not_outlast_are_told(settings: Settings) -> None:
    with Arena(settings).rig(compute.BLOCK_BYTES) as rig:

        def clock(step: Step, count: int) -> tuple[float, float]:
            rig._engine.drain()
            return 1e-6, 1e-6

        work = Work("any", lambda: None, clock, 1)
        row = compute._row(rig, work, "store", compute._copies(rig)["store"])
    assert row.covered == 0.0


def test_copies_outlast_the_computing(settings: Settings) -> None:
    with Arena(settings).rig(compute.BLOCK_BYTES) as rig:
        moves = compute._copies(rig)["load"]
        queue = compute._enough(rig, moves, 0.05)
        assert len(queue) % len(moves) == 0
        assert len(queue) > len(moves)
