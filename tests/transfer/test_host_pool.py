from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from sam_connector.transfer import host_pool
from sam_connector.transfer.host_pool import HostPool


def test_slots_lie_one_after_another() -> None:
    pool = HostPool(5, 192)
    assert pool.tensor.shape == (5, 192)
    assert pool.tensor.dtype == torch.uint8
    assert pool.tensor.is_contiguous()
    assert (pool.num_slots, pool.slot_bytes, pool.num_bytes) == (5, 192, 960)
    assert not pool.is_pinned


def test_a_slot_is_written_in_place() -> None:
    pool = HostPool(5, 192)
    view = pool.slot(3)
    assert (len(view), view.readonly, view.format) == (192, False, "B")
    view[:4] = b"\x01\x02\x03\x04"
    assert pool.tensor[3, :5].tolist() == [1, 2, 3, 4, 0]
    assert int(pool.tensor.sum()) == 10
    pool.tensor[3, 0] = 9
    assert view[0] == 9


@pytest.mark.parametrize("index", [-1, 5])
def test_there_is_no_such_slot(index: int) -> None:
    with pytest.raises(IndexError, match="pool of 5"):
        HostPool(5, 192).slot(index)


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 64), (4, 0), (-1, 64)])
def test_sizes_are_positive(num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="needs slots"):
        HostPool(num_slots, slot_bytes)


def _resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE // 1024


def test_every_page_is_in_memory_from_the_start() -> None:
    before = _resident_kib()
    pool = HostPool(64, 1 << 20)
    assert _resident_kib() - before >= 60 * 1024
    pool.close()
    assert _resident_kib() - before < 32 * 1024


def test_close_may_be_repeated() -> None:
    pool = HostPool(2, 64)
    view = pool.slot(1)
    pool.close()
    pool.close()
    view[0] = 1
    with pytest.raises(ValueError, match="closed"):
        _ = pool.tensor
    with pytest.raises(ValueError, match="closed"):
        pool.slot(0)


def test_memory_that_is_not_there_is_not_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_pool, "available_bytes", lambda: 1000)
    monkeypatch.setattr(host_pool.mmap, "mmap", None)
    with pytest.raises(MemoryError, match=r"1024 bytes .* only 1000 bytes"):
        HostPool(2, 512)


def test_memory_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "available_bytes", lambda: None)
    with pytest.raises(MemoryError, match=str(1 << 62)):
        HostPool(1 << 32, 1 << 30)
    with pytest.raises(MemoryError, match=str(1 << 70)):
        HostPool(1 << 40, 1 << 30)


def test_a_system_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(host_pool.mmap, "MADV_HUGEPAGE", raising=False)
    assert HostPool(2, 64).tensor.sum() == 0


class _Cudart:
    """Remembers what is registered; answers with ``code``."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pinning_registers_the_exact_bytes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = _Cudart()
    monkeypatch.setattr(host_pool, "_cuda", SimpleNamespace(cudart=lambda: cudart))
    pool = HostPool(3, 1000, pin=True)
    assert pool.is_pinned
    assert cudart.registered == {pool.tensor.data_ptr(): 3000}
    pool.close()
    pool.close()
    assert cudart.registered == {}
    assert not pool.is_pinned


def test_pinning_that_fails_is_an_error_with_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = _Cudart(code=2)
    monkeypatch.setattr(host_pool, "_cuda", SimpleNamespace(cudart=lambda: cudart))
    with pytest.raises(RuntimeError, match=r"3000 bytes .*: 2"):
        HostPool(3, 1000, pin=True)
