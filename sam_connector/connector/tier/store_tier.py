"""What goes between the host tier's slots and a store, and when.

Values wait in a bounded queue (loads of requests first, then prefetches, then writes)
and are handed to the ranks as far as the window of bytes in flight allows. Nothing is
pinned while it waits. Scheduler thread only; the store itself is spoken to by the
ranks' and the pooling manager's threads.
"""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence

from sam_connector.config import StoreConfig, StorePolicy
from sam_connector.connector.metadata import StoreDirection, StoreJob, StoreResult
from sam_connector.connector.tier.store_jobs import (
    RunningJob,
    SlotSide,
    StoreJobTable,
    StoreTransfer,
    Waiter,
)
from sam_connector.connector.tier.store_sessions import StoreSessions
from sam_connector.connector.tier.values import Value, ValueShape
from sam_connector.core.slot_pool import Content, Slot
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.back_pressure import InflightWindow
from sam_connector.pooling.manager import SessionPoolingManager
from sam_connector.pooling.transfer_queue import (
    AdmissionStatus,
    Priority,
    Transfer,
    TransferQueue,
)
from sam_connector.storage.guard import BreakerState, CircuitBreaker

#: Whose blocks are: all tenants share what they compute, as in vLLM's own cache, and
#: are kept apart by ``cache_salt``, which is part of a block's hash.
DEFAULT_TENANT = ""

#: Bytes per rank that one job is about: enough to keep a connection busy, and little
#: enough that several connections share a large request.
_JOB_BYTES = 8 << 20


class StoreTier:
    """The store, as the host tier sees it.

    Args:
        state: of the host tier.
        spm: what is known of the store and its sessions.
        shape: how blocks make values.
        config: settings.
        num_ranks: ranks that read and write.
        fingerprint: part of every name, until a reset.
        breaker: of this process; ranks have their own.

    Attributes:
        reading: contents that are on their way to a slot, or queued for it.
        counts: what has happened, for ``stats``.
        sessions: what the store is told, and asked, of sessions.
    """

    def __init__(
        self,
        state: SlotSide,
        spm: SessionPoolingManager,
        shape: ValueShape,
        config: StoreConfig,
        *,
        num_ranks: int,
        fingerprint: str,
        breaker: CircuitBreaker,
    ) -> None:
        self._state = state
        self._breaker = breaker
        self.spm = spm
        self.shape = shape
        self.config = config
        self._num_ranks = num_ranks
        self._fingerprint = self._current_fingerprint = fingerprint
        self._queue = TransferQueue(
            max_entries=config.store_max_queued,
            max_bytes=config.store_max_queued_bytes,
        )
        self._window = InflightWindow(
            min_bytes=_JOB_BYTES * num_ranks,
            max_bytes=max(config.store_max_inflight_bytes, _JOB_BYTES * num_ranks),
            target_s=config.store_timeout_s / 2,
        )
        self._jobs = StoreJobTable(num_ranks)
        self._transfers: dict[tuple[StoreDirection, Content], StoreTransfer] = {}
        self.reading: set[Content] = set()
        self.counts: Counter[str] = Counter()
        self.sessions = StoreSessions(state, spm, shape)

    # --- look-up ------------------------------------------------------------------

    def num_readable(
        self, group_id: GroupId, hashes: Sequence[BlockHash], first: int, last: int
    ) -> int | None:
        """Blocks from ``first`` on that the store has without a gap.

        Changes nothing but what is being asked in the background.

        Args:
            group_id: the group.
            hashes: of the whole sequence.
            first: index of the first block wanted.
            last: index behind the last.

        Returns:
            At most ``last - first``; ``None`` while the store has not answered, and
            only until its deadline.
        """
        values = []
        index = first
        while index < last:
            value = self.shape.value_at(group_id, hashes, index)
            if value is None:
                break
            values.append(value)
            index += len(value.hashes) - index % self.shape.num_blocks[group_id]
        if not values:
            return 0
        answers = self.spm.lookup([value.chunk for value in values])
        num_values = sum(1 for _ in itertools.takewhile(bool, answers))
        if num_values < len(answers) and answers[num_values] is None:
            return None
        if not num_values:
            return 0
        size = self.shape.num_blocks[group_id]
        end = (first // size + num_values) * size
        return min(end, last) - first

    # --- transfers ----------------------------------------------------------------

    def read(
        self,
        value: Value,
        *,
        priority: Priority,
        session: SessionKey | None,
        waiter: Waiter,
    ) -> str | None:
        """Brings a value's blocks into slots; ``waiter`` hears of the end.

        Returns:
            Why it is refused; ``None`` if it is on its way.
        """
        return self._request(StoreDirection.READ, value, priority, session, waiter)

    def write(
        self, value: Value, *, session: SessionKey | None, waiter: Waiter
    ) -> str | None:
        """Writes a value whose blocks are in slots; else as ``read``.

        Its slots must stay until it is its turn, or it ends without success.
        """
        return self._request(
            StoreDirection.WRITE, value, Priority.WRITE, session, waiter
        )

    def evict(
        self, session: SessionKey, contexts: Sequence[ContextBlocks], *, purge: bool
    ) -> None:
        """The session was evicted: what is queued for it alone comes to nothing.

        Its values are not kept alive, and its manifest goes; no instance knows who else
        leases them, so that they live out their time.

        Args:
            session: which.
            contexts: all of its, or none if only a range was meant.
            purge: delete at once what no other session known here shares.
        """
        for item in self._queue.cancel(session):
            self._end(item.payload, "cancelled by evict")
        if contexts:
            purged = self.sessions.purgeable(session, contexts) if purge else ()
            for chunk in purged:
                writing = self._transfers.get((StoreDirection.WRITE, chunk))
                if writing is not None:
                    writing.is_purged = True
            self.sessions.end(session, purge=purged)

    def _request(
        self,
        direction: StoreDirection,
        value: Value,
        priority: Priority,
        session: SessionKey | None,
        waiter: Waiter,
    ) -> str | None:
        known = self._transfers.get((direction, value.chunk))
        transfer = known or StoreTransfer(direction, value)
        is_queued = known is None or not known.slots
        if is_queued:
            admission = self._queue.offer(
                Transfer(
                    priority=priority,
                    tenant=DEFAULT_TENANT if session is None else session.tenant,
                    session=session,
                    chunk=(direction, *value.chunk),
                    num_bytes=self._num_bytes(value),
                    payload=transfer,
                )
            )
            if admission.status is AdmissionStatus.REJECTED:
                self.counts["store_rejected"] += 1
                return admission.reason
        transfer.waiters.append(waiter)
        if known is None:
            self._transfers[transfer.key] = transfer
            if direction is StoreDirection.READ:
                self.reading.update(value.contents)
        return None

    # --- steps --------------------------------------------------------------------

    @property
    def writes_sessions(self) -> bool:
        """Whether what sessions compute is written without being asked for."""
        return self.config.store_policy is StorePolicy.SESSIONS

    @property
    def is_due(self) -> bool:
        """Whether ``on_step`` has anything to do."""
        return (
            self._jobs.has_new
            or self.spm.has_events
            or (
                len(self._queue) > 0 and self._jobs.num_bytes < self._window.limit_bytes
            )
        )

    @property
    def is_busy(self) -> bool:
        """Whether the store owes an answer: some step must come and take it."""
        return bool(len(self._jobs) or len(self._queue) or self.spm.num_open)

    def hear(self) -> None:
        """Takes what the pooling manager's threads have found out."""
        if self.spm.has_events:
            self.sessions.hear()

    def on_step(self) -> tuple[StoreJob, ...]:
        """Starts what the window allows; returns what the ranks are to start."""
        budget = self._window.limit_bytes - self._jobs.num_bytes
        if budget > 0 and len(self._queue):
            self._start(self._queue.take(budget))
        return self._jobs.take_new()

    def on_report(self, results: Iterable[StoreResult]) -> None:
        """Ranks are done with jobs."""
        for job in self._jobs.report(results):
            self._on_ended(job)

    def _start(self, items: Sequence[Transfer]) -> None:
        ready = [
            (item.priority, item.payload)
            for item in items
            if self._take_slots(item.payload)
        ]
        for (priority, _, group_id), run in itertools.groupby(ready, key=_kind):
            batch: list[StoreTransfer] = []
            num_bytes = 0
            for _, transfer in run:
                batch.append(transfer)
                num_bytes += self._num_bytes(transfer.value)
                if num_bytes >= _JOB_BYTES * self._num_ranks:
                    self._start_job(batch, num_bytes, priority, group_id)
                    batch, num_bytes = [], 0
            if batch:
                self._start_job(batch, num_bytes, priority, group_id)

    def _start_job(
        self,
        batch: Sequence[StoreTransfer],
        num_bytes: int,
        priority: Priority,
        group_id: GroupId,
    ) -> None:
        self._jobs.start(
            RunningJob(
                transfers=batch,
                generation=self._state.generation,
                started_at=self._state.clock.now(),
                num_bytes=num_bytes,
            ),
            urgency=int(priority),
            fingerprint=self._current_fingerprint,
            tenant=DEFAULT_TENANT,
            num_parts=self.shape.num_parts[group_id],
        )

    def _take_slots(self, transfer: StoreTransfer) -> bool:
        """Pins what a transfer reads or fills; ends it if that cannot be had."""
        slots = self._state.slots
        present = [slots.get(content) for content in transfer.value.contents]
        if transfer.direction is StoreDirection.WRITE:
            if None in present:
                self._end(transfer, "displaced before it was written")
                return False
            transfer.slots = present
            slots.pin(transfer.pinned)
            return True
        num_wanted = present.count(None)
        if not num_wanted:
            self._end(transfer)
            return False
        if slots.num_available(num_wanted) < num_wanted:
            self._end(transfer, "the host tier is full of leased contexts")
            return False
        # What is there must not be displaced by what is read beside it.
        kept: list[Slot] = [slot for slot in present if slot is not None]
        slots.pin(kept)
        taken = iter(slots.allocate(num_wanted))
        slots.unpin(kept[::-1])
        transfer.slots = [None if slot else next(taken) for slot in present]
        return True

    def _on_ended(self, job: RunningJob) -> None:
        # A value that is not there is an answer, and quick ones make a wide window.
        if job.failed - job.missing:
            self._window.on_failure()
        else:
            self._window.on_success(self._state.clock.now() - job.started_at)
        if job.generation == self._state.generation:
            self._tell(job)
        num_done = num_bytes = 0
        for position, transfer in enumerate(job.transfers):
            reason = self._why_failed(job, position)
            if reason is None:
                num_done += 1
                num_bytes += self._num_bytes(transfer.value)
            self._settle(transfer, reason)
        name = f"store_{job.transfers[0].direction.value}"
        self.counts[f"{name}_failed"] += len(job.transfers) - num_done
        self.counts[f"{name}_values"] += num_done
        self.counts[f"{name}_bytes"] += num_bytes

    def _why_failed(self, job: RunningJob, position: int) -> str | None:
        if job.generation != self._state.generation:
            return "the cache was reset"
        if position in job.missing:
            return "it is not in the store any more"
        if position in job.failed:
            return f"the store: {job.error}"
        return None

    def _tell(self, job: RunningJob) -> None:
        """The pooling manager learns what is there and what is not."""
        chunks = [transfer.value.chunk for transfer in job.transfers]
        missing = [chunks[position] for position in job.missing]
        unreadable = [chunks[position] for position in job.failed - job.missing]
        if job.transfers[0].direction is StoreDirection.WRITE:
            done = set(range(len(chunks))) - job.failed
            purged = {i for i, t in enumerate(job.transfers) if t.is_purged}
            self.spm.on_written([chunks[i] for i in sorted(done - purged)])
            # Also what has failed: another rank may have written its part.
            self.spm.delete([chunks[i] for i in sorted(purged)])
        elif unreadable:
            self.spm.on_unreadable(unreadable)
        if missing:
            self.spm.on_missing(missing)

    def _settle(self, transfer: StoreTransfer, reason: str | None) -> None:
        """Publishes what was read, tells who waits, then gives the slots back."""
        if reason is None and transfer.direction is StoreDirection.READ:
            for slot, content in zip(
                transfer.slots, transfer.value.contents, strict=True
            ):
                if slot is not None:
                    self._state.slots.publish(slot, content)
        pinned = transfer.pinned
        self._end(transfer, reason)
        # Tails first in line, as everywhere.
        self._state.slots.unpin(pinned[::-1])

    def _end(self, transfer: StoreTransfer, reason: str | None = None) -> None:
        self._transfers.pop(transfer.key, None)
        if transfer.direction is StoreDirection.READ:
            self.reading.difference_update(transfer.value.contents)
        transfer.end(reason)

    def _num_bytes(self, value: Value) -> int:
        return self._state.block_bytes[value.group_id] * len(value.hashes)

    # --- state --------------------------------------------------------------------

    def reset(self, *, keep_names: bool = False) -> None:
        """Content is void, here and in the store.

        Other instances may still write what is void under the names that are used
        now, so that this one uses names of its own until it is started again.

        Args:
            keep_names: what the store has is not void.
        """
        if not keep_names:
            self._current_fingerprint = f"{self._fingerprint}-{uuid.uuid4().hex[:8]}"
        self.spm.clear(self._current_fingerprint)
        self.sessions.reset()
        self.abandon("the cache was reset")

    def abandon(self, reason: str) -> None:
        """Ends everything that waits; what is under way ends by itself."""
        budget = 1 << 62
        while len(self._queue):
            for item in self._queue.take(budget):
                self._end(item.payload, reason)

    def now(self) -> float:
        return self._state.clock.now()

    @property
    def is_up(self) -> bool:
        """Whether the store answered when it was last called."""
        return self._breaker.state is BreakerState.CLOSED

    def close(self) -> None:
        self.spm.close()

    def stats(self) -> dict[str, int | float | str]:
        queued = self._queue.stats()
        return {
            "store_jobs_in_flight": len(self._jobs),
            "store_bytes_in_flight": self._jobs.num_bytes,
            "store_queued": len(self._queue),
            "store_queued_bytes": queued.num_bytes,
            "store_window_bytes": self._window.limit_bytes,
            "store_late_reports": self._jobs.num_late,
            **{name: self.counts[name] for name in _COUNTS},
            **self.spm.stats(),
            "store_up": int(self.is_up),
            **{
                f"store_breaker_{name}": value
                for name, value in self._breaker.stats().items()
            },
        }

    def pins(self) -> list[Slot]:
        """Slots that transfers have pinned; for the leak check."""
        return [
            slot
            for job in self._jobs.running()
            for transfer in job.transfers
            for slot in transfer.pinned
        ]


_COUNTS = (
    "store_rejected",
    "store_read_values",
    "store_read_bytes",
    "store_read_failed",
    "store_write_values",
    "store_write_bytes",
    "store_write_failed",
)


def _kind(item: tuple[Priority, StoreTransfer]) -> tuple[Priority, str, GroupId]:
    priority, transfer = item
    return priority, transfer.direction.value, transfer.value.group_id
