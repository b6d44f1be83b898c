from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.transfer_bandwidth import jobs
from benchmarks.transfer_bandwidth.rig import Arena, WrongBytesError
from benchmarks.transfer_bandwidth.settings import KIB, Settings
from sam_connector.transfer import Direction
from sam_connector.transfer.cpu_engine import CpuCopyEngine
from sam_connector.transfer.gather import GatherCopier
from sam_connector.transfer.planner import CopyPlan


def test_every_size_of_job_that_there_is_memory_for(settings: Settings) -> None:
    """2 MiB are 64 blocks of 32 KiB, and 2 of 1 MiB."""
    lines: list[object] = []
    rows = jobs.measure(Arena(settings), lines.append)
    assert rows == lines
    found = [(row.block_bytes, row.blocks_per_job, row.direction) for row in rows]
    assert found == [
        (32 * KIB, 1, "store"),
        (32 * KIB, 1, "load"),
        (32 * KIB, 16, "store"),
        (32 * KIB, 16, "load"),
        (32 * KIB, 8, "both"),
        (1024 * KIB, 1, "store"),
        (1024 * KIB, 1, "load"),
        (1024 * KIB, 1, "both"),
    ]
    assert [row.num_jobs for row in rows] == [64, 64, 4, 4, 8, 2, 2, 2]
    assert all(row.ratio > 0 for row in rows)
    assert all((row.job_us is None) == (row.direction == "both") for row in rows)


def test_bandwidth_is_of_the_bytes_that_were_moved(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """Every byte is counted once, whichever way it goes."""
    moved: list[int] = []
    real = CpuCopyEngine._execute

    def execute(self: CpuCopyEngine, plan: CopyPlan) -> None:
        moved.append(plan.descriptors.num_bytes)
        real(self, plan)

    monkeypatch.setattr(CpuCopyEngine, "_execute", execute)
    seen: dict[str, int] = {}
    real_turns = jobs.in_turns

    def in_turns(sides: dict[str, jobs.Side], repeats: int) -> object:
        for name in sides.keys() - {"plain"}:
            moved.clear()
            sides[name].run()
            assert sum(moved) == sides[name].num_bytes
            seen[name] = seen.get(name, 0) + 1
        return real_turns(sides, repeats)

    monkeypatch.setattr(jobs, "in_turns", in_turns)
    jobs.measure(Arena(settings), lambda line: None)
    assert seen == {"queued": 6, "alone": 6, "engine": 2}


def test_rounds_move_other_memory(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setattr(jobs, "MAX_JOBS", 16)
    with Arena(settings).rig(32 * KIB) as rig:
        seen: list[list[int]] = []
        real = rig.run

        def run(moves: list[jobs.Move]) -> None:
            if len(moves) == 16:
                seen.append([slot for move in moves for slot in move.ids.slots])
            real(moves)

        monkeypatch.setattr(rig, "run", run)
        jobs._one_way(rig, 1, Direction.STORE)
    assert not set(seen[0]) & set(seen[1])


def test_both_ways_share_no_block_and_no_slot(settings: Settings) -> None:
    with Arena(settings).rig(32 * KIB) as rig:
        moves = jobs.both_ways(rig)
        directions = [move.direction for move in moves]
        assert directions == [Direction.STORE, Direction.LOAD] * 4
        for ids in ("block_ids", "slots"):
            named = [each for move in moves for each in getattr(move.ids, ids)]
            assert sorted(named) == list(range(rig.num_blocks))


def test_wrong_bytes_of_one_of_both_ways_are_noticed(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: object, direction: Direction) -> None:
        if direction is Direction.STORE:
            real(self, part, direction)  # type: ignore[arg-type]

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with (
        Arena(settings).rig(32 * KIB) as rig,
        pytest.raises(WrongBytesError, match=r"load\+store: 32 blocks"),
    ):
        jobs._both_ways(rig)
