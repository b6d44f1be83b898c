"""Blocks from the engine's memory to a store and back, and each leg of that alone."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import redis
import torch

from sam_connector.connector.metadata import StoreDirection, StoreJob, StoreValue
from sam_connector.connector.store_io import StoreIo
from sam_connector.storage.registry import StoreOptions, open_store
from sam_connector.transfer import (
    CopyJob,
    Direction,
    GroupCopy,
    make_copy_engine,
)
from sam_connector.transfer.host_pool import HostPool
from sam_connector.transfer.layout import SlotLayout

_BLOCK_BYTES = 2 << 20
_NUM_BLOCKS = 64
_NUM_LAYERS = 8
_BLOCKS_PER_JOB = 4
_THREADS = 2
_CPU = torch.device("cpu")


class WholePath:
    """A rank as the connector has it: blocks, slots, a copy engine, store threads.

    Args:
        url: of a server that is ours alone, since it is emptied.
        device: where the blocks lie.
    """

    def __init__(self, url: str, device: torch.device = _CPU) -> None:
        shape = (_NUM_BLOCKS, _BLOCK_BYTES // _NUM_LAYERS)
        self.blocks = [
            torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            for _ in range(_NUM_LAYERS)
        ]
        groups = {0: self.blocks}
        layout = SlotLayout.of(groups)
        self._pool = HostPool(_NUM_BLOCKS, layout.slot_bytes, pin=device.type == "cuda")
        self._engine = make_copy_engine(
            groups, layout, self._pool, device=device, num_threads=_THREADS
        )
        options = StoreOptions(num_connections=_THREADS)
        self._store = open_store(url, options).blocks
        self._io = StoreIo(
            self._store,
            self._pool,
            {0: _BLOCK_BYTES},
            rank=0,
            num_threads=_THREADS,
            timeout_s=30.0,
            ttl_s=3_600.0,
        )
        self._server = redis.Redis.from_url(url)

    @property
    def num_bytes(self) -> int:
        return _BLOCK_BYTES * _NUM_BLOCKS

    def close(self) -> None:
        self._io.close()
        self._engine.close()
        self._pool.close()
        self._server.close()

    def measure(self, num_rounds: int) -> dict[str, float]:
        """GB/s of each leg alone, and of all at once in a pipeline."""
        legs: dict[str, Callable[[], float]] = {
            "block_to_slot": lambda: self._copy(Direction.STORE),
            "slot_to_store": self._write,
            "store_to_slot": self._read,
            "slot_to_block": lambda: self._copy(Direction.LOAD),
            "out": self._out,
            "back": self._back,
        }
        took: dict[str, list[float]] = {name: [] for name in legs}
        for _ in range(num_rounds):
            for name, leg in legs.items():
                if name in ("slot_to_store", "out"):
                    # What is there would not be written again.
                    self._server.flushall()
                took[name].append(leg())
            self._check()
        rates = {
            name: round(self.num_bytes / statistics.median(times) / 1e9, 3)
            for name, times in took.items()
        }
        rates["out_slowest_leg"] = min(rates["block_to_slot"], rates["slot_to_store"])
        rates["back_slowest_leg"] = min(rates["store_to_slot"], rates["slot_to_block"])
        return rates

    def _check(self) -> None:
        """What comes back is what went out, though blocks and slots were wiped."""
        kept = [layer.clone() for layer in self.blocks]
        for layer in self.blocks:
            layer.zero_()
        for slot in range(_NUM_BLOCKS):
            self._pool.slot(slot)[:] = bytes(_BLOCK_BYTES)
        self._back()
        for layer, expected in zip(self.blocks, kept, strict=True):
            if not torch.equal(layer, expected):
                raise RuntimeError("wrong bytes came back")

    # --- legs -----------------------------------------------------------------------

    def _copy(self, direction: Direction) -> float:
        start = time.monotonic()
        for index, ids in enumerate(_jobs()):
            self._engine.submit(_copy_job(index, direction, ids))
        self._engine.drain()
        for result in self._engine.poll():
            assert result.error is None, result.error
        return time.monotonic() - start

    def _write(self) -> float:
        return self._store_leg(StoreDirection.WRITE)

    def _read(self) -> float:
        return self._store_leg(StoreDirection.READ)

    def _store_leg(self, direction: StoreDirection) -> float:
        start = time.monotonic()
        jobs = list(_jobs())
        for index, ids in enumerate(jobs):
            self._io.submit(self._store_job(index, direction, ids))
        self._await_store(len(jobs))
        return time.monotonic() - start

    def _out(self) -> float:
        start = time.monotonic()
        jobs = list(_jobs())
        for index, ids in enumerate(jobs):
            self._engine.submit(_copy_job(index, Direction.STORE, ids))
        num_copied = 0
        while num_copied < len(jobs):
            for result in self._engine.poll():
                ids = jobs[result.job_id]
                self._io.submit(
                    self._store_job(result.job_id, StoreDirection.WRITE, ids)
                )
                num_copied += 1
            _breathe()
        self._await_store(len(jobs))
        return time.monotonic() - start

    def _back(self) -> float:
        start = time.monotonic()
        jobs = list(_jobs())
        for index, ids in enumerate(jobs):
            self._io.submit(self._store_job(index, StoreDirection.READ, ids))
        num_read = 0
        while num_read < len(jobs):
            for result in self._io.poll():
                assert not result.failed, result.error
                job = _copy_job(result.job_id, Direction.LOAD, jobs[result.job_id])
                self._engine.submit(job)
                num_read += 1
            _breathe()
        self._engine.drain()
        self._engine.poll()
        return time.monotonic() - start

    def _await_store(self, num_jobs: int) -> None:
        num_done = 0
        while num_done < num_jobs:
            for result in self._io.poll():
                assert not result.failed, result.error
                num_done += 1
            _breathe()

    def _store_job(
        self, job_id: int, direction: StoreDirection, ids: Sequence[int]
    ) -> StoreJob:
        return StoreJob(
            job_id=job_id,
            direction=direction,
            urgency=0,
            fingerprint=f"{0:032x}",
            tenant="",
            num_parts=1,
            values=tuple(
                StoreValue(0, index.to_bytes(32, "big"), (index,)) for index in ids
            ),
        )


def _jobs() -> Iterator[list[int]]:
    for start in range(0, _NUM_BLOCKS, _BLOCKS_PER_JOB):
        yield list(range(start, start + _BLOCKS_PER_JOB))


def _copy_job(job_id: int, direction: Direction, ids: Sequence[int]) -> CopyJob:
    part = GroupCopy(group_id=0, block_ids=ids, slots=ids)
    return CopyJob(job_id=job_id, direction=direction, parts=(part,))


def _breathe() -> None:
    """Lets other threads run; as often as a busy engine takes steps, or more."""
    threading.Event().wait(0.0005)
