"""The host memory that blocks are copied to: slots of one size in one buffer."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

from sam_connector.transfer.host_memory import available_bytes

#: Untyped: so is ``cudart`` in torch.
_cuda: Any = torch.cuda


class HostPool:
    """``num_slots`` records of ``slot_bytes`` in one contiguous buffer.

    Every page is in memory when the constructor returns, so that no copy pays for a
    page fault. It asks for huge pages where the system has them.

    Not thread-safe, except that slots may be read and written from anywhere.

    Args:
        num_slots: how many slots, at least one.
        slot_bytes: size of each.
        pin: register the buffer with CUDA, page-locked, for asynchronous copies.
            torch's own pinned memory would round its size up to a power of two.

    Raises:
        ValueError: a size below one.
        MemoryError: there is not that much memory.
        RuntimeError: CUDA would not pin it.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pin: bool = False) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(
                f"a host pool needs slots with bytes: {num_slots} x {slot_bytes}"
            )
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._is_pinned = False
        self._tensor: torch.Tensor | None = _allocate(num_slots, slot_bytes)
        if pin:
            self._pin(self._tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer as uint8 ``[num_slots, slot_bytes]``."""
        if self._tensor is None:
            raise ValueError("the host pool is closed")
        return self._tensor

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable and not copied.

        Raises:
            IndexError: there is no such slot.
        """
        if not 0 <= index < self._num_slots:
            raise IndexError(f"slot {index} of a pool of {self._num_slots}")
        return self.tensor[index].numpy().data

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_slots * self._slot_bytes

    @property
    def is_pinned(self) -> bool:
        return self._is_pinned

    def close(self) -> None:
        """Unpins the buffer and lets go of it; safe to call again.

        No copy may be in flight. The memory is returned with the last view of it.
        """
        if self._tensor is None:
            return
        if self._is_pinned:
            _cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
            self._is_pinned = False
        self._tensor = None

    def _pin(self, tensor: torch.Tensor) -> None:
        code = _cuda.cudart().cudaHostRegister(tensor.data_ptr(), self.num_bytes, 0)
        if int(code) != 0:
            raise RuntimeError(
                f"CUDA would not pin {self.num_bytes} bytes of host memory: {code}"
            )
        self._is_pinned = True


def _allocate(num_slots: int, slot_bytes: int) -> torch.Tensor:
    num_bytes = num_slots * slot_bytes
    wanted = f"a host pool of {num_bytes} bytes ({num_slots} slots of {slot_bytes})"
    # The kernel promises more than it has, and kills when the pages are touched.
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise MemoryError(f"{wanted}: only {available} bytes are available")
    try:
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{wanted}: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(num_slots, slot_bytes)
    return tensor.zero_()
