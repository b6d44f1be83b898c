from __future__ import annotations

import ctypes
import errno

import numpy as np
import pytest

pytest.importorskip("torch")

from sam_connector.transfer import gather
from sam_connector.transfer.contract import Direction
from sam_connector.transfer.gather import GatherCopier, VectorCopy, vector_copies
from sam_connector.transfer.layout import Descriptors

NUM_PIECES = 2500


class _Arena:
    """Two buffers, and pieces of random sizes scattered over both."""

    def __init__(self, max_size: int = 40, num_pieces: int = NUM_PIECES) -> None:
        rng = np.random.default_rng(4)
        self.device = rng.integers(0, 255, max_size * num_pieces, dtype=np.uint8)
        self.host = rng.integers(0, 255, max_size * num_pieces, dtype=np.uint8)
        self.sizes = rng.integers(1, max_size + 1, num_pieces)
        self.starts = [rng.permutation(num_pieces) * max_size for _ in range(2)]
        self.expected = {
            Direction.STORE: (self.device.copy(), self._copied(self.host, 1)),
            Direction.LOAD: (self._copied(self.device, 0), self.host.copy()),
        }
        self.descriptors = Descriptors(
            device=self.starts[0] + self.device.ctypes.data,
            host=self.starts[1] + self.host.ctypes.data,
            sizes=self.sizes,
        )

    def _copied(self, target: np.ndarray, side: int) -> np.ndarray:
        result = target.copy()
        source = self.device if target is self.host else self.host
        for index, size in enumerate(self.sizes):
            to, from_ = self.starts[side][index], self.starts[1 - side][index]
            result[to : to + size] = source[from_ : from_ + size]
        return result

    def check(self, direction: Direction) -> None:
        device, host = self.expected[direction]
        assert np.array_equal(self.device, device)
        assert np.array_equal(self.host, host)


@pytest.fixture
def system_calls() -> dict[Direction, VectorCopy]:
    calls = vector_copies()
    if not calls:
        pytest.skip("this system has no calls for lists of copies")
    return calls


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("large", [1, 20, 10**9], ids=["all", "some", "none"])
def test_every_byte_by_either_way(
    monkeypatch: pytest.MonkeyPatch,
    system_calls: dict[Direction, VectorCopy],
    direction: Direction,
    large: int,
) -> None:
    monkeypatch.setattr(gather, "LARGE_PIECE_BYTES", large)
    arena = _Arena()
    GatherCopier(system_calls).copy(arena.descriptors, direction)
    arena.check(direction)


@pytest.mark.parametrize("direction", Direction)
def test_systems_without_such_calls(direction: Direction) -> None:
    arena = _Arena()
    GatherCopier({}).copy(arena.descriptors, direction)
    arena.check(direction)


@pytest.mark.parametrize("direction", Direction)
def test_a_call_may_stop_anywhere(
    system_calls: dict[Direction, VectorCopy], direction: Direction
) -> None:
    """As it does after 2 GiB."""
    arena = _Arena(num_pieces=300)
    real = system_calls[direction]

    def short(
        pid: int, local: int, num_local: int, remote: int, num_remote: int, flags: int
    ) -> int:
        """Copies at most one and a half pieces."""
        vectors = (ctypes.c_size_t * (2 * num_local)).from_address(local)
        vectors[3 if num_local > 1 else 1] = (
            max(1, vectors[3] // 2) if num_local > 1 else vectors[1]
        )
        return real(pid, local, min(2, num_local), remote, num_remote, flags)

    GatherCopier({direction: short}).copy(arena.descriptors, direction)
    arena.check(direction)


@pytest.mark.parametrize("direction", Direction)
def test_neighbours_on_one_side_are_one_entry_there(
    system_calls: dict[Direction, VectorCopy], direction: Direction
) -> None:
    """Blocks from all over go to slots in a row."""
    num_pieces, size = 100, 48
    order = np.random.default_rng(2).permutation(num_pieces)
    device, host = (
        np.random.default_rng(seed).integers(0, 255, (num_pieces, size), np.uint8)
        for seed in (3, 4)
    )
    expected = device[order] if direction is Direction.STORE else host.copy()
    counts: list[tuple[int, int]] = []

    def counting(
        pid: int, local: int, num_local: int, remote: int, num_remote: int, flags: int
    ) -> int:
        counts.append((num_local, num_remote))
        return system_calls[direction](pid, local, num_local, remote, num_remote, flags)

    descriptors = Descriptors(
        device=device.ctypes.data + order * size,
        host=host.ctypes.data + np.arange(num_pieces) * size,
        sizes=np.full(num_pieces, size),
    )
    GatherCopier({direction: counting}).copy(descriptors, direction)
    assert np.array_equal(host, expected)
    assert np.array_equal(device[order], expected)
    ((num_local, num_remote),) = counts
    assert num_local > 90
    assert num_remote == 1


@pytest.mark.parametrize("direction", Direction)
def test_next_to_nothing_takes_no_system_call(direction: Direction) -> None:
    def refuse(*arguments: int) -> int:
        raise AssertionError(arguments)

    arena = _Arena(num_pieces=gather.QUICK_PIECES)
    GatherCopier({direction: refuse}).copy(arena.descriptors, direction)
    arena.check(direction)


@pytest.mark.parametrize(
    ("num_pieces", "max_size"),
    [(gather.QUICK_PIECES + 1, 40), (2, 2 * gather.QUICK_BYTES)],
    ids=["pieces", "bytes"],
)
def test_more_than_that_gives_the_lock_up(
    monkeypatch: pytest.MonkeyPatch,
    system_calls: dict[Direction, VectorCopy],
    num_pieces: int,
    max_size: int,
) -> None:
    monkeypatch.setattr(gather, "LARGE_PIECE_BYTES", 1 << 40)
    arena = _Arena(max_size, num_pieces)
    counts: list[int] = []
    real = system_calls[Direction.STORE]

    def counting(
        pid: int, local: int, num_local: int, remote: int, num_remote: int, flags: int
    ) -> int:
        counts.append(num_local)
        return real(pid, local, num_local, remote, num_remote, flags)

    GatherCopier({Direction.STORE: counting}).copy(arena.descriptors, Direction.STORE)
    arena.check(Direction.STORE)
    assert counts


def test_nothing_is_a_list_too(system_calls: dict[Direction, VectorCopy]) -> None:
    GatherCopier(system_calls).copy(Descriptors.concatenate([]), Direction.STORE)


@pytest.mark.parametrize("direction", Direction)
def test_memory_that_is_not_there_is_an_error(
    system_calls: dict[Direction, VectorCopy], direction: Direction
) -> None:
    arena = _Arena(num_pieces=10)
    arena.descriptors.device[4] = 8
    with pytest.raises(OSError, match="copying in memory") as caught:
        GatherCopier(system_calls).copy(arena.descriptors, direction)
    assert caught.value.errno == errno.EFAULT


class _SlowClock:
    """Every copy seems to have waited for the interpreter lock."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.02
        return self.now


def test_single_copies_end_where_the_lock_is_contended(
    monkeypatch: pytest.MonkeyPatch, system_calls: dict[Direction, VectorCopy]
) -> None:
    monkeypatch.setattr(gather, "LARGE_PIECE_BYTES", 1)
    monkeypatch.setattr(gather, "time", _SlowClock())
    copier = GatherCopier(system_calls)
    counts: list[int] = []
    real = copier._copy_singly

    def counting(
        part: Descriptors, direction: Direction, *, stop_when_slow: bool
    ) -> int:
        counts.append(real(part, direction, stop_when_slow=stop_when_slow))
        return counts[-1]

    monkeypatch.setattr(copier, "_copy_singly", counting)
    for _ in range(2):
        arena = _Arena()
        copier.copy(arena.descriptors, Direction.STORE)
        arena.check(Direction.STORE)
    assert counts == [1], "after one slow copy, none by itself for a while"


def test_calls_that_are_forbidden_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "_typed", lambda call: lambda *_: -1)
    assert vector_copies() == {}


@pytest.mark.parametrize("where", ["darwin", "win32"])
def test_other_systems_have_no_such_calls(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(gather.sys, "platform", where)
    assert vector_copies() == {}
