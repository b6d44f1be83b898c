"""Many host memory copies at once, without the interpreter lock in between.

A thread that gives up the interpreter lock for every block gets it back only when
the thread that computes lets go of it: up to 5 ms a block. Linux copies whole lists of
pieces in one system call, ``process_vm_readv`` and ``process_vm_writev`` with this
process as its own peer, and needs the lock once. The price is a look-up for every page
on the *remote* side. That side is always the host pool, which has huge pages.

While nobody wants the lock, ``memmove`` is faster for large pieces. So those go one by
one, until a call takes suspiciously long. And where there is next to nothing to copy,
it is done before the lock could have been given up and taken back.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from sam_connector.transfer.contract import Direction
from sam_connector.transfer.layout import Descriptors, slice_bytes

VectorCopy: TypeAlias = Callable[[int, int, int, int, int, int], int]

#: Pieces of this size or more are worth a call each while the lock is free.
LARGE_PIECE_BYTES = 128 * 1024

#: A ``memmove`` slower than this waited for the lock, or for a processor.
SLOW_CALL_S = 300e-6
SLOW_BYTES_PER_S = 2e9

#: How long the lock counts as contended after such a call.
CONTENDED_FOR_S = 0.1

#: Up to so much, in so few pieces, is copied in microseconds with the lock held.
QUICK_BYTES = 64 * 1024
QUICK_PIECES = 4

_memmove_with_lock = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)

#: The most pieces that one system call takes on Linux.
MAX_PIECES = 1024


class GatherCopier:
    """Copies lists of pieces on the calling thread; one instance per thread.

    Args:
        vector_calls: the system calls by direction; none makes every piece a
            ``memmove``.
    """

    def __init__(self, vector_calls: dict[Direction, VectorCopy] | None = None) -> None:
        self._vector_calls = vector_copies() if vector_calls is None else vector_calls
        self._contended_until = 0.0

    def copy(self, descriptors: Descriptors, direction: Direction) -> None:
        """Copies everything, in whatever order.

        Raises:
            OSError: the kernel refused; part of it may have been copied.
        """
        if len(descriptors) <= QUICK_PIECES and descriptors.num_bytes <= QUICK_BYTES:
            _copy_quickly(descriptors, direction)
            return
        if not self._vector_calls:
            self._copy_singly(descriptors, direction, stop_when_slow=False)
            return
        is_large = descriptors.sizes >= LARGE_PIECE_BYTES
        if not is_large.any() or time.monotonic() < self._contended_until:
            self._copy_vector(descriptors, direction)
            return
        self._copy_vector(_subset(descriptors, ~is_large), direction)
        large = _subset(descriptors, is_large)
        done = self._copy_singly(large, direction, stop_when_slow=True)
        self._copy_vector(_subset(large, slice(done, None)), direction)

    def _copy_singly(
        self, descriptors: Descriptors, direction: Direction, *, stop_when_slow: bool
    ) -> int:
        """Returns how many pieces were copied before the lock was contended."""
        sources, targets = _ends(descriptors, direction)
        memmove, clock = ctypes.memmove, time.monotonic
        sizes = descriptors.sizes.tolist()
        for index, size in enumerate(sizes):
            start = clock()
            memmove(targets[index], sources[index], size)
            end = clock()
            if stop_when_slow and end - start > SLOW_CALL_S + size / SLOW_BYTES_PER_S:
                self._contended_until = end + CONTENDED_FOR_S
                return index + 1
        return len(sizes)

    def _copy_vector(self, descriptors: Descriptors, direction: Direction) -> None:
        call, pid = self._vector_calls[direction], os.getpid()
        for start in range(0, len(descriptors), MAX_PIECES):
            batch = _subset(descriptors, slice(start, start + MAX_PIECES))
            while len(batch):
                local = _io_vector(batch.device, batch.sizes)
                remote = _io_vector(batch.host, batch.sizes)
                copied = call(
                    pid,
                    local.ctypes.data,
                    len(local),
                    remote.ctypes.data,
                    len(remote),
                    0,
                )
                if copied <= 0:
                    code = ctypes.get_errno()
                    raise OSError(code, f"copying in memory: {os.strerror(code)}")
                # A call moves 2 GiB at most and may stop anywhere.
                batch = slice_bytes(batch, copied, batch.num_bytes)


def _copy_quickly(descriptors: Descriptors, direction: Direction) -> None:
    sources, targets = _ends(descriptors, direction)
    sizes = descriptors.sizes.tolist()
    for source, target, size in zip(sources, targets, sizes, strict=True):
        _memmove_with_lock(target, source, size)


def _ends(
    descriptors: Descriptors, direction: Direction
) -> tuple[list[int], list[int]]:
    """Where each piece is and where it goes."""
    device, host = descriptors.device.tolist(), descriptors.host.tolist()
    return (device, host) if direction is Direction.STORE else (host, device)


def _subset(descriptors: Descriptors, which: object) -> Descriptors:
    index: np.ndarray | slice = which  # type: ignore[assignment]
    return Descriptors(
        device=descriptors.device[index],
        host=descriptors.host[index],
        sizes=descriptors.sizes[index],
    )


def _io_vector(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The kernel's ``struct iovec[]``: an address and a length, again and again.

    The two sides are two strings of bytes to the kernel, cut wherever they like. So
    neighbours are joined on each side alone: it looks pages up once for each entry.
    """
    is_first = np.ones(len(sizes), dtype=bool)
    np.not_equal(addresses[:-1] + sizes[:-1], addresses[1:], out=is_first[1:])
    first = np.flatnonzero(is_first)
    vector = np.empty((len(first), 2), dtype=np.int64)
    vector[:, 0] = addresses[first]
    vector[:, 1] = np.add.reduceat(sizes, first)
    return vector


def vector_copies() -> dict[Direction, VectorCopy]:
    """The system calls, or nothing where there are none or they are forbidden."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return {}
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        calls = {
            Direction.STORE: _typed(libc.process_vm_writev),
            Direction.LOAD: _typed(libc.process_vm_readv),
        }
    except AttributeError:
        return {}
    return calls if all(_works(call) for call in calls.values()) else {}


def _typed(call: ctypes._NamedFuncPointer) -> VectorCopy:
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return call


def _works(call: VectorCopy) -> bool:
    """Sandboxes may refuse the call even to a process that means itself."""
    cells = np.zeros((2, 8), dtype=np.uint8)
    vectors = np.array([[cell.ctypes.data, 8] for cell in cells], dtype=np.int64)
    local, remote = (vector.ctypes.data for vector in vectors)
    return call(os.getpid(), local, 1, remote, 1, 0) == 8
