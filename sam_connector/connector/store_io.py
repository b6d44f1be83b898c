"""One rank's reads and writes between its host slots and the store.

Threads of its own, so that neither the worker nor the engine ever waits for a store.
What goes wrong is reported and never raised.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from sam_connector.connector.metadata import (
    StoreDirection,
    StoreJob,
    StoreResult,
    StoreValue,
)
from sam_connector.core.types import BlockHash, GroupId
from sam_connector.storage import frame
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, Outcome, StoreBackend

logger = logging.getLogger(__name__)

#: Slot of a block that is read and thrown away.
_NOWHERE = -1

#: Goes behind every job, so that threads end once nothing is queued.
_END_URGENCY = 1 << 30

_MAX_CLOSE_S = 2.0


class SlotMemory(Protocol):
    """The host slots; ``HostPool`` is one."""

    def slot(self, index: int) -> memoryview: ...


class StoreIo:
    """Store jobs of one rank.

    ``submit`` and ``poll`` are the worker's, and return at once. The slots of a job
    are read and written until ``poll`` has returned its result.

    Args:
        store: answers within its deadline, whatever happens.
        memory: the slots.
        record_bytes: of one block of each group on this rank.
        rank: of this worker among all that copy.
        num_threads: jobs at a time.
        timeout_s: for each call to the store.
        ttl_s: life of what is written.
    """

    def __init__(
        self,
        store: StoreBackend,
        memory: SlotMemory,
        record_bytes: Mapping[int, int],
        *,
        rank: int,
        num_threads: int,
        timeout_s: float,
        ttl_s: float,
    ) -> None:
        self._store = store
        self._memory = memory
        self._record_bytes = record_bytes
        self._rank = rank
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, StoreJob | None]]
        self._queue = queue.PriorityQueue()
        self._results: deque[StoreResult] = deque()
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"sam-store-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: StoreJob) -> None:
        self._queue.put((job.urgency, next(self._order), job))

    def poll(self) -> list[StoreResult]:
        """Jobs that ended since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """Ends the threads; jobs not begun fail. Waits for a call under way.

        Slots may still be read and written afterwards only if the store broke its
        promise to answer in time.
        """
        self._is_closed.set()
        for _ in self._threads:
            self._queue.put((_END_URGENCY, next(self._order), None))
        deadline = time.monotonic() + self._timeout_s + _MAX_CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._store.close()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing reads or writes slots any more."""
        return not any(thread.is_alive() for thread in self._threads)

    # --- threads ------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            _, _, job = self._queue.get()
            if job is None:
                return
            try:
                if self._is_closed.is_set():
                    result = self._failed(job, "the engine ends")
                else:
                    result = self._execute(job)
            except Exception as error:
                logger.exception("store job failed")
                result = self._failed(job, repr(error))
            self._results.append(result)

    def _execute(self, job: StoreJob) -> StoreResult:
        values = [self._entries(job, value) for value in job.values]
        if job.direction is StoreDirection.WRITE:
            return self._write(job, values)
        return self._read(job, values)

    def _entries(self, job: StoreJob, value: StoreValue) -> list[Entry]:
        """The value's parts: where the bytes are or go, without their headers."""
        size = self._record_bytes[value.group_id]
        records = [
            memoryview(bytearray(size))
            if slot == _NOWHERE
            else self._memory.slot(slot)[:size]
            for slot in value.slots
        ]
        if job.num_parts == 1:
            return [Entry(self._key(job, value, 0), records)]
        # Only single blocks are cut.
        step = -(-size // job.num_parts)
        return [
            Entry(
                self._key(job, value, part),
                [record[part * step : (part + 1) * step] for record in records],
            )
            for part in range(job.num_parts)
        ]

    def _key(self, job: StoreJob, value: StoreValue, part: int) -> StoreKey:
        return StoreKey(
            tenant=job.tenant,
            fingerprint=job.fingerprint,
            group_id=GroupId(value.group_id),
            rank=self._rank,
            block_hash=BlockHash(value.block_hash),
            part=part,
        )

    def _write(self, job: StoreJob, values: Sequence[Sequence[Entry]]) -> StoreResult:
        entries = [entry for parts in values for entry in parts]
        # What another session or instance has written already only lives on.
        known = self._store.touch(
            [entry.key for entry in entries],
            ttl_s=self._ttl_s,
            deadline=self._deadline(),
        )
        there = {
            entry.key
            for entry, outcome in zip(entries, known.outcomes, strict=True)
            if outcome is Outcome.DONE
        }
        new = [
            Entry(
                entry.key,
                [
                    memoryview(frame.encode_header(job.fingerprint, entry.buffers)),
                    *entry.buffers,
                ],
            )
            for entry in entries
            if entry.key not in there
        ]
        written = BatchResult(())
        if new and known.error is None:
            written = self._store.put(new, ttl_s=self._ttl_s, deadline=self._deadline())
            there.update(
                entry.key
                for entry, outcome in zip(new, written.outcomes, strict=True)
                if outcome is Outcome.DONE
            )
        failed = {
            position
            for position, parts in enumerate(values)
            if any(entry.key not in there for entry in parts)
        }
        error = known.error or written.error
        return StoreResult(
            rank=self._rank,
            job_id=job.job_id,
            failed=frozenset(failed),
            error=_text(error) if failed else None,
        )

    def _read(self, job: StoreJob, values: Sequence[Sequence[Entry]]) -> StoreResult:
        framed = [
            Entry(
                entry.key, [memoryview(bytearray(frame.HEADER_BYTES)), *entry.buffers]
            )
            for parts in values
            for entry in parts
        ]
        positions = [
            position for position, parts in enumerate(values) for _ in range(len(parts))
        ]
        result = self._store.get(framed, deadline=self._deadline())
        failed: set[int] = set()
        missing: set[int] = set()
        useless: list[StoreKey] = []
        reason = _text(result.error)
        for position, entry, outcome in zip(
            positions, framed, result.outcomes, strict=True
        ):
            if outcome is Outcome.DONE:
                header, *content = entry.buffers
                flaw = frame.verify(header, job.fingerprint, content)
                if flaw is None:
                    continue
                reason = f"{entry.key}: {flaw}"
                logger.warning("a value in the store is not usable: %s", reason)
                useless.append(entry.key)
                missing.add(position)
            elif outcome is Outcome.MISSING:
                # Or there, with another length or of another type.
                useless.append(entry.key)
                missing.add(position)
            failed.add(position)
        if useless:
            # Else it would be refreshed for ever, and never written anew.
            self._store.delete(useless, deadline=self._deadline())
        return StoreResult(
            rank=self._rank,
            job_id=job.job_id,
            failed=frozenset(failed),
            missing=frozenset(missing),
            error=reason if failed else None,
        )

    def _failed(self, job: StoreJob, reason: str) -> StoreResult:
        return StoreResult(
            rank=self._rank,
            job_id=job.job_id,
            failed=frozenset(range(len(job.values))),
            error=reason,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s


def _text(error: Exception | None) -> str | None:
    return None if error is None else str(error)
