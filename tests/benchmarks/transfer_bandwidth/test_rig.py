from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import itertools

from benchmarks.transfer_bandwidth.rig import Arena, Ids, Move, Rig, WrongBytesError
from benchmarks.transfer_bandwidth.settings import KIB, Settings
from sam_connector.transfer import Direction
from sam_connector.transfer.gather import GatherCopier
from sam_connector.transfer.layout import Descriptors, slice_bytes


@pytest.fixture
def rig(settings: Settings) -> Iterator[Rig]:
    with Arena(settings).rig(64 * KIB) as rig:
        yield rig


def _all(rig: Rig, direction: Direction) -> list[Move]:
    return [Move(direction, Ids.of("scattered", rig.num_blocks))]


def test_ids_are_all_blocks_in_all_slots() -> None:
    for kind in ("contiguous", "scattered"):
        ids = Ids.of(kind, 64)
        assert sorted(ids.block_ids) == sorted(ids.slots) == list(range(64))
    assert Ids.of("contiguous", 9).slots == list(range(9))


def test_scattered_ids_have_no_neighbours_to_speak_of() -> None:
    ids = Ids.of("scattered", 1000)
    pairs = zip(ids.block_ids, ids.slots, strict=True)
    moved = [slot - block_id for block_id, slot in pairs]
    together = sum(a == b for a, b in itertools.pairwise(moved))
    assert together < 10


def test_jobs_are_full_and_name_nothing_twice() -> None:
    parts = Ids.of("scattered", 100).split(30)
    assert [len(part) for part in parts] == [30, 30, 30]
    slots = [slot for part in parts for slot in part.slots]
    assert len(set(slots)) == 90


@pytest.mark.parametrize("direction", Direction)
def test_what_is_right_passes(rig: Rig, direction: Direction) -> None:
    rig.check(_all(rig, direction))


def test_moves_may_follow_each_other(rig: Rig) -> None:
    """What went out comes back to other blocks."""
    ids = Ids.of("scattered", rig.num_blocks)
    back = Ids(ids.block_ids[::-1], ids.slots)
    rig.check([Move(Direction.STORE, ids), Move(Direction.LOAD, back)])


@pytest.mark.parametrize("direction", Direction)
def test_a_byte_that_is_missing_is_noticed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        real(self, slice_bytes(part, 0, part.num_bytes - 1), direction)

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(WrongBytesError, match=direction.value):
        rig.check(_all(rig, direction))


@pytest.mark.parametrize("direction", Direction)
def test_the_wrong_way_round_is_noticed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """Both sides are equal then, too."""
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        real(self, part, direction.opposite)

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(WrongBytesError, match=direction.value):
        rig.check(_all(rig, direction))


def test_a_byte_elsewhere_is_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a slot that no move names."""
    real = GatherCopier.copy

    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        real(self, part, direction)
        rig.slots[3, 5] ^= 1

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(WrongBytesError, match="1 slots are wrong"):
        rig.check([Move(Direction.STORE, Ids([7], [1]))])


def test_a_copy_that_fails_ends_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: GatherCopier, part: Descriptors, direction: Direction) -> None:
        raise OSError(14, "bad address")

    monkeypatch.setattr(GatherCopier, "copy", copy)
    with pytest.raises(RuntimeError, match="bad address"):
        rig.run(_all(rig, Direction.STORE))


def test_a_job_that_got_lost_is_noticed(rig: Rig) -> None:
    rig.submit(_all(rig, Direction.STORE))
    with pytest.raises(RuntimeError, match="1 results for 2 jobs"):
        rig.finish(2)


def test_huge_pages_hold_the_same_bytes(settings: Settings) -> None:
    with Arena(replace(settings, huge_pages=True)).rig(64 * KIB) as rig:
        rig.check(_all(rig, Direction.STORE))
