"""What copies are compared with: the same bytes, moved as one would without us."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.transfer_bandwidth.rig import Ids
from sam_connector.transfer import Direction
from sam_connector.transfer.cuda_driver import ACCESS_STREAM, load_single_copies

Copy = Callable[[], None]

#: Untyped: builds of torch without CUDA describe stand-ins for its streams.
_cuda: Any = torch.cuda


def plain_copy(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    direction: Direction,
    *,
    num_threads: int,
    piece_bytes: int | None = None,
) -> Copy:
    """A function that copies all of one to all of the other and waits for it.

    Args:
        blocks: the device's memory, dense.
        slots: the host's, dense, of the same size.
        direction: from which to which.
        num_threads: that copy on a CPU, each an equal part.
        piece_bytes: on a CPU, call ``memcpy`` for so many bytes at a time, from the
            first to the last; ``None`` makes one call per thread.
    """
    source, target = _in_order(blocks, slots, direction)
    if blocks.is_cuda:
        return _by_device([(source, target)])
    return _by_memcpy(_shares(source, target, num_threads), piece_bytes)


def plain_copy_both_ways(
    blocks: torch.Tensor, slots: torch.Tensor, *, num_threads: int
) -> Copy:
    """The first half of the blocks to slots, and the second half of the slots back.

    On a GPU both at once; on a CPU half of the threads, or half of the time, for each.
    """
    half = blocks.numel() // 2
    pairs = [(blocks[:half], slots[:half]), (slots[half:], blocks[half:])]
    if blocks.is_cuda:
        return _by_device(pairs)
    # Each thread has a share of either direction, and every other one begins with
    # the second, so that both are under way at any time.
    shares = [_shares(*pair, num_threads) for pair in pairs]
    return _by_memcpy(
        [
            first + second if index % 2 == 0 else second + first
            for index, (first, second) in enumerate(zip(*shares, strict=True))
        ],
        None,
    )


def single_copies(
    blocks: torch.Tensor, slots: torch.Tensor, direction: Direction, ids: Ids
) -> Copy:
    """On a GPU: ``cudaMemcpyAsync`` for every block, called by way of the driver."""
    source, target = _in_order(blocks, slots, direction)
    source_ids, target_ids = _in_order(ids.block_ids, ids.slots, direction)
    size = blocks.shape[1]
    sources = np.array(source_ids, dtype=np.int64) * size + source.data_ptr()
    targets = np.array(target_ids, dtype=np.int64) * size + target.data_ptr()
    sizes = np.full(len(ids), size, dtype=np.int64)
    call = load_single_copies()

    def copy() -> None:
        stream = _cuda.current_stream()
        call(
            targets,
            sources,
            sizes,
            access_order=ACCESS_STREAM,
            stream=stream.cuda_stream,
        )
        stream.synchronize()

    return copy


def swap_blocks(
    blocks: torch.Tensor, slots: torch.Tensor, direction: Direction, ids: Ids
) -> tuple[Copy, str]:
    """vLLM's ``swap_blocks``, or what it does by torch; and which of the two."""
    source, target = _in_order(blocks, slots, direction)
    pairs = list(zip(*_in_order(ids.block_ids, ids.slots, direction), strict=True))
    operation = _vllm_swap_blocks() if blocks.is_cuda else None
    if operation is None:
        # Views made beforehand: vLLM's own adds up addresses.
        rows = [(source[index], target[at]) for index, at in pairs]

        def enqueue() -> None:
            for row, to in rows:
                to.copy_(row, non_blocking=True)

    else:
        mapping = torch.tensor(pairs, dtype=torch.int64)
        size = blocks.shape[1]

        def enqueue() -> None:
            operation(source, target, size, mapping)

    def copy() -> None:
        enqueue()
        if blocks.is_cuda:
            _cuda.current_stream().synchronize()

    return copy, "torch" if operation is None else "vllm"


def _vllm_swap_blocks() -> Callable[..., None] | None:
    try:
        importlib.import_module("vllm._custom_ops")
        operation: Callable[..., None] = torch.ops._C_cache_ops.swap_blocks
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None
    return operation


def _in_order(blocks: Any, slots: Any, direction: Direction) -> tuple[Any, Any]:
    return (blocks, slots) if direction is Direction.STORE else (slots, blocks)


def _by_device(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
    streams = [_cuda.Stream() for _ in pairs]

    def copy() -> None:
        for stream, (source, target) in zip(streams, pairs, strict=True):
            with _cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return copy


#: Source address, target address, bytes.
_Pieces = list[tuple[int, int, int]]


def _shares(
    source: torch.Tensor, target: torch.Tensor, num_threads: int
) -> list[_Pieces]:
    """An equal part for every thread; the last takes what is left over."""
    from_, to, total = source.data_ptr(), target.data_ptr(), source.numel()
    starts = [total // num_threads * index for index in range(num_threads)]
    return [
        [(from_ + start, to + start, end - start)]
        for start, end in zip(starts, [*starts[1:], total], strict=True)
    ]


def _by_memcpy(shares: list[_Pieces], piece_bytes: int | None) -> Copy:
    threads = ThreadPoolExecutor(len(shares))

    def copy_share(pieces: _Pieces) -> None:
        for source, target, size in pieces:
            step = piece_bytes or size
            for offset in range(0, size, step):
                ctypes.memmove(
                    target + offset, source + offset, min(step, size - offset)
                )

    def copy() -> None:
        for _ in threads.map(copy_share, shares):
            pass

    return copy
