"""What waits to be moved to or from a store, in the order in which it should be.

Bounded in entries and in bytes, fair between tenants; no threads and no clock.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from sam_connector.core.types import SessionKey
from sam_connector.errors import IntegrityError


class Priority(enum.IntEnum):
    """Which goes first: the lower."""

    #: A request waits for it.
    LOAD = 0
    PREFETCH = 1
    WRITE = 2


class AdmissionStatus(enum.Enum):
    QUEUED = enum.auto()
    #: The same was queued already; it is moved once, for both.
    JOINED = enum.auto()
    REJECTED = enum.auto()


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a transfer is on its way; ``reason`` says why not."""

    status: AdmissionStatus
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One value to be moved.

    Attributes:
        priority: how urgent it is.
        tenant: on whose account.
        session: whose evict cancels it; ``None`` if nobody's.
        chunk: its identity; whatever has the same is the same transfer.
        num_bytes: of all ranks together.
        payload: the caller's.
    """

    priority: Priority
    tenant: str
    session: SessionKey | None
    chunk: Hashable
    num_bytes: int
    payload: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Attributes: what is queued, and what has become of all that was offered."""

    num_entries: int
    num_bytes: int
    num_tenants: int
    num_queued: int
    num_joined: int
    num_rejected: int
    num_cancelled: int
    num_taken: int


@dataclass(slots=True)
class _Entry:
    transfer: Transfer
    #: Everybody who wants it; ``None`` for those without a session.
    sessions: set[SessionKey | None]


#: Tenants take turns: the first is next. Each one's chunks are in their order.
_Lane = OrderedDict[str, dict[Hashable, None]]


class TransferQueue:
    """The queue. One thread only.

    Args:
        max_entries: most transfers at a time.
        max_bytes: most bytes; a single transfer may be larger if it is alone.
        quota: most bytes that a tenant may have queued; ``None`` for no limit.
        merge: what becomes of two payloads (the queued one, the new one) of the same
            chunk; the queued one stays by default.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        quota: Callable[[str], int | None] | None = None,
        merge: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._quota = quota
        self._merge = merge
        self._entries: dict[Hashable, _Entry] = {}
        self._lanes: dict[Priority, _Lane] = {p: OrderedDict() for p in Priority}
        self._by_session: dict[SessionKey, dict[Hashable, None]] = {}
        self._tenant_bytes: dict[str, int] = {}
        self._num_bytes = 0
        self._num_queued = 0
        self._num_joined = 0
        self._num_rejected = 0
        self._num_cancelled = 0
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._entries)

    def is_queued(self, chunk: Hashable) -> bool:
        return chunk in self._entries

    def offer(self, transfer: Transfer) -> Admission:
        """Queues a transfer, or joins it with the same one that waits."""
        entry = self._entries.get(transfer.chunk)
        if entry is not None:
            self._join(entry, transfer)
            self._num_joined += 1
            return Admission(AdmissionStatus.JOINED)
        reason = self._refusal(transfer)
        if reason is not None:
            self._num_rejected += 1
            return Admission(AdmissionStatus.REJECTED, reason)
        self._entries[transfer.chunk] = _Entry(transfer, set())
        self._want(self._entries[transfer.chunk], transfer.session)
        self._enter_lane(transfer)
        self._num_bytes += transfer.num_bytes
        self._tenant_bytes[transfer.tenant] = (
            self._tenant_bytes.get(transfer.tenant, 0) + transfer.num_bytes
        )
        self._num_queued += 1
        return Admission(AdmissionStatus.QUEUED)

    def take(self, max_bytes: int) -> list[Transfer]:
        """Takes what is next, up to ``max_bytes``; one at least if there is any."""
        taken: list[Transfer] = []
        num_bytes = 0
        while (transfer := self._next()) is not None:
            if taken and num_bytes + transfer.num_bytes > max_bytes:
                break
            self._rotate(transfer)
            self._remove(transfer.chunk)
            taken.append(transfer)
            num_bytes += transfer.num_bytes
        self._num_taken += len(taken)
        return taken

    def cancel(self, session: SessionKey) -> list[Transfer]:
        """Takes out what this session alone wants."""
        cancelled = []
        for chunk in self._by_session.pop(session, ()):
            entry = self._entries[chunk]
            entry.sessions.discard(session)
            if not entry.sessions:
                cancelled.append(entry.transfer)
                self._remove(chunk)
        self._num_cancelled += len(cancelled)
        return cancelled

    def stats(self) -> QueueStats:
        return QueueStats(
            num_entries=len(self._entries),
            num_bytes=self._num_bytes,
            num_tenants=len(self._tenant_bytes),
            num_queued=self._num_queued,
            num_joined=self._num_joined,
            num_rejected=self._num_rejected,
            num_cancelled=self._num_cancelled,
            num_taken=self._num_taken,
        )

    def _refusal(self, transfer: Transfer) -> str | None:
        if len(self._entries) >= self._max_entries:
            return f"{self._max_entries} transfers are waiting for the store"
        total = self._num_bytes + transfer.num_bytes
        if self._entries and total > self._max_bytes:
            return f"{self._num_bytes} bytes are waiting for the store"
        quota = self._quota(transfer.tenant) if self._quota else None
        used = self._tenant_bytes.get(transfer.tenant, 0)
        if quota is not None and used + transfer.num_bytes > quota:
            return f"{used} bytes of the tenant are waiting for the store"
        return None

    def _join(self, entry: _Entry, transfer: Transfer) -> None:
        old = entry.transfer
        payload = old.payload
        if self._merge is not None:
            payload = self._merge(payload, transfer.payload)
        priority = min(old.priority, transfer.priority)
        entry.transfer = replace(old, priority=priority, payload=payload)
        if priority is not old.priority:
            self._leave_lane(old)
            self._enter_lane(entry.transfer)
        self._want(entry, transfer.session)

    def _want(self, entry: _Entry, session: SessionKey | None) -> None:
        entry.sessions.add(session)
        if session is not None:
            self._by_session.setdefault(session, {})[entry.transfer.chunk] = None

    def _next(self) -> Transfer | None:
        for priority in Priority:
            for chunks in self._lanes[priority].values():
                return self._entries[next(iter(chunks))].transfer
        return None

    def _rotate(self, transfer: Transfer) -> None:
        """The tenant has had its turn."""
        self._lanes[transfer.priority].move_to_end(transfer.tenant)

    def _enter_lane(self, transfer: Transfer) -> None:
        lane = self._lanes[transfer.priority]
        lane.setdefault(transfer.tenant, {})[transfer.chunk] = None

    def _leave_lane(self, transfer: Transfer) -> None:
        lane = self._lanes[transfer.priority]
        del lane[transfer.tenant][transfer.chunk]
        if not lane[transfer.tenant]:
            del lane[transfer.tenant]

    def _remove(self, chunk: Hashable) -> None:
        entry = self._entries.pop(chunk)
        transfer = entry.transfer
        self._leave_lane(transfer)
        for session in entry.sessions:
            if session is not None:
                del self._by_session[session][chunk]
                if not self._by_session[session]:
                    del self._by_session[session]
        self._num_bytes -= transfer.num_bytes
        left = self._tenant_bytes[transfer.tenant] - transfer.num_bytes
        if left or any(transfer.tenant in lane for lane in self._lanes.values()):
            self._tenant_bytes[transfer.tenant] = left
        else:
            del self._tenant_bytes[transfer.tenant]

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the indexes and the sums disagree."""
        lanes = {
            chunk: (priority, tenant)
            for priority, lane in self._lanes.items()
            for tenant, chunks in lane.items()
            for chunk in chunks
        }
        tenants: dict[str, int] = {}
        for chunk, entry in self._entries.items():
            transfer = entry.transfer
            if lanes.get(chunk) != (transfer.priority, transfer.tenant):
                raise IntegrityError(f"{chunk!r} waits in the wrong place")
            if not entry.sessions:
                raise IntegrityError(f"nobody wants {chunk!r}")
            for session in entry.sessions - {None}:
                if session and chunk not in self._by_session.get(session, {}):
                    raise IntegrityError(f"{chunk!r} is not indexed by session")
            tenants[transfer.tenant] = (
                tenants.get(transfer.tenant, 0) + transfer.num_bytes
            )
        if len(lanes) != len(self._entries):
            raise IntegrityError(f"{len(lanes)} waiting, {len(self._entries)} known")
        for session, chunks in self._by_session.items():
            if not chunks or not all(
                chunk in self._entries and session in self._entries[chunk].sessions
                for chunk in chunks
            ):
                raise IntegrityError(f"{session} is indexed for what it does not want")
        if tenants != self._tenant_bytes or sum(tenants.values()) != self._num_bytes:
            raise IntegrityError(f"{self._tenant_bytes} bytes counted, are {tenants}")
        if any(not chunks for lane in self._lanes.values() for chunks in lane.values()):
            raise IntegrityError("a tenant without transfers has a turn")


__all__ = [
    "Admission",
    "AdmissionStatus",
    "Priority",
    "QueueStats",
    "Transfer",
    "TransferQueue",
]
