"""What waits to be moved between a store and host memory."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError


class Priority(enum.IntEnum):
    """Who goes first."""

    LOAD = 0  # a request waits for it
    PREFETCH = 1  # a request is expected
    WRITE = 2  # nobody waits


class AdmissionStatus(enum.Enum):
    QUEUED = enum.auto()
    #: The same was queued already; it is done once.
    JOINED = enum.auto()
    REJECTED = enum.auto()


@dataclass(frozen=True, slots=True)
class Admission:
    status: AdmissionStatus
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One value to move.

    Attributes:
        priority: its class.
        tenant: classes are fair between tenants.
        session: who asked; ``None`` for a request that named none.
        chunk: two transfers with the same are one.
        num_bytes: for the bounds.
        payload: the caller's.
    """

    priority: Priority
    tenant: str
    session: SessionKey | None
    chunk: Hashable
    num_bytes: int
    payload: Any = None


@dataclass(eq=False, slots=True)
class _Entry:
    transfer: Transfer
    sessions: set[SessionKey | None]
    is_live: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    num_entries: int
    num_bytes: int
    num_rejected: int


def _no_quota(tenant: str) -> int | None:
    return None


class TransferQueue:
    """A bounded queue with classes, fair between the tenants of each.

    Pure and not thread-safe. Full means refused, with the reason; nothing that was
    accepted is ever dropped but by ``cancel``.

    Args:
        max_entries: bound on their number.
        max_bytes: bound on their bytes.
        quota: most bytes of a tenant in the queue; ``None`` for no bound of its own.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        quota: Callable[[str], int | None] = _no_quota,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._quota = quota
        self._entries: dict[Hashable, _Entry] = {}
        # By class, then tenant; tenants in the order of their turns.
        self._lanes: dict[Priority, dict[str, deque[_Entry]]] = {
            priority: {} for priority in Priority
        }
        self._num_bytes = 0
        self._bytes_of: dict[str, int] = {}
        self._num_rejected = 0

    def __len__(self) -> int:
        return len(self._entries)

    def is_queued(self, chunk: Hashable) -> bool:
        return chunk in self._entries

    def offer(self, transfer: Transfer) -> Admission:
        """Queues a transfer, or joins it with one of the same chunk.

        The one that is there keeps its payload, and moves up if this is more urgent.
        """
        known = self._entries.get(transfer.chunk)
        if known is not None:
            known.sessions.add(transfer.session)
            if transfer.priority < known.transfer.priority:
                self._move_up(known, transfer.priority)
            return Admission(AdmissionStatus.JOINED)
        reason = self._refusal(transfer)
        if reason is not None:
            self._num_rejected += 1
            return Admission(AdmissionStatus.REJECTED, reason)
        entry = _Entry(transfer, {transfer.session})
        self._entries[transfer.chunk] = entry
        self._add_bytes(transfer, transfer.num_bytes)
        self._lane(transfer).append(entry)
        return Admission(AdmissionStatus.QUEUED)

    def take(self, max_bytes: int) -> list[Transfer]:
        """Takes what goes next, as much as fits; at least one if there is any."""
        taken: list[Transfer] = []
        num_bytes = 0
        for priority in Priority:
            lanes = self._lanes[priority]
            while lanes:
                tenant, lane = next(iter(lanes.items()))
                while lane and not lane[0].is_live:
                    lane.popleft()
                if not lane:
                    del lanes[tenant]
                    continue
                transfer = lane[0].transfer
                if taken and num_bytes + transfer.num_bytes > max_bytes:
                    return taken
                self._remove(lane.popleft())
                taken.append(transfer)
                num_bytes += transfer.num_bytes
                # To the end: it is the next tenant's turn.
                del lanes[tenant]
                if lane:
                    lanes[tenant] = lane
        return taken

    def cancel(self, session: SessionKey) -> list[Transfer]:
        """Takes out what only this session has asked for."""
        cancelled = []
        for entry in list(self._entries.values()):
            if session in entry.sessions:
                entry.sessions.discard(session)
                if not entry.sessions:
                    self._remove(entry)
                    cancelled.append(entry.transfer)
        return cancelled

    def stats(self) -> QueueStats:
        return QueueStats(
            num_entries=len(self._entries),
            num_bytes=self._num_bytes,
            num_rejected=self._num_rejected,
        )

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if lanes, index and counts disagree."""
        queued = [
            entry
            for lanes in self._lanes.values()
            for lane in lanes.values()
            for entry in lane
            if entry.is_live
        ]
        if {id(e) for e in queued} != {id(e) for e in self._entries.values()}:
            raise IntegrityError("lanes and index disagree")
        if self._num_bytes != sum(e.transfer.num_bytes for e in queued):
            raise IntegrityError("bytes in the queue")
        if sum(self._bytes_of.values()) != self._num_bytes:
            raise IntegrityError("bytes by tenant")

    def _refusal(self, transfer: Transfer) -> str | None:
        if len(self._entries) >= self._max_entries:
            return f"{self._max_entries} transfers are waiting for the store"
        if self._num_bytes + transfer.num_bytes > self._max_bytes:
            return f"{self._num_bytes} bytes are waiting for the store"
        quota = self._quota(transfer.tenant)
        used = self._bytes_of.get(transfer.tenant, 0)
        if quota is not None and used + transfer.num_bytes > quota:
            return f"{used} bytes of the tenant are waiting for the store"
        return None

    def _lane(self, transfer: Transfer) -> deque[_Entry]:
        return self._lanes[transfer.priority].setdefault(transfer.tenant, deque())

    def _move_up(self, entry: _Entry, priority: Priority) -> None:
        old = entry.transfer
        moved = Transfer(
            priority=priority,
            tenant=old.tenant,
            session=old.session,
            chunk=old.chunk,
            num_bytes=old.num_bytes,
            payload=old.payload,
        )
        entry.is_live = False
        successor = _Entry(moved, entry.sessions)
        self._entries[old.chunk] = successor
        self._lane(moved).append(successor)

    def _remove(self, entry: _Entry) -> None:
        entry.is_live = False
        del self._entries[entry.transfer.chunk]
        self._add_bytes(entry.transfer, -entry.transfer.num_bytes)

    def _add_bytes(self, transfer: Transfer, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        total = self._bytes_of.get(transfer.tenant, 0) + num_bytes
        if total:
            self._bytes_of[transfer.tenant] = total
        else:
            self._bytes_of.pop(transfer.tenant, None)
