"""What copies are compared with: the same bytes in one piece, by the same means."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from sam_connector.transfer import Direction


def plain_copy(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    direction: Direction,
    *,
    num_threads: int,
    piece_bytes: int | None = None,
) -> Callable[[], None]:
    """A function that copies all of one to all of the other and waits for it.

    Args:
        blocks: the device's memory, dense.
        slots: the host's, dense, of the same size.
        direction: from which to which.
        num_threads: that copy on a CPU, each an equal part.
        piece_bytes: on a CPU, call ``memcpy`` for so many bytes at a time, from the
            first to the last; ``None`` makes one call per thread.
    """
    source, target = blocks, slots
    if direction is Direction.LOAD:
        source, target = target, source
    if blocks.is_cuda:
        return _by_device(source, target)
    return _by_memcpy(source, target, num_threads, piece_bytes)


def _by_device(source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return copy


def _by_memcpy(
    source: torch.Tensor,
    target: torch.Tensor,
    num_threads: int,
    piece_bytes: int | None,
) -> Callable[[], None]:
    threads = ThreadPoolExecutor(num_threads)
    share = source.numel() // num_threads
    step = piece_bytes or share
    from_, to = source.data_ptr(), target.data_ptr()

    def copy_share(index: int) -> None:
        start = index * share
        end = source.numel() if index == num_threads - 1 else start + share
        for offset in range(start, end, step):
            ctypes.memmove(to + offset, from_ + offset, min(step, end - offset))

    def copy() -> None:
        for _ in threads.map(copy_share, range(num_threads)):
            pass

    return copy
