"""What a store must do to hold blocks (``StoreBackend``) and manifests.

Contract of every method of both ports:

- It is called from threads of ours that may block, never from the engine's, and from
  several of them at once.
- It returns by ``deadline`` (``time.monotonic()`` seconds), give or take a scheduling
  delay, whatever the server does.
- It raises nothing for what a server or a network can do: such outcomes are values.
  ``ValueError`` is for a caller's mistake.
- After it has returned it touches no buffer of the caller any more, also when it gave
  up. If it cannot promise that, it must copy.
- A reply is never attributed to another request: a connection whose state is not
  certain is closed.
- The server's state is not assumed to be as it was left: it may have been emptied,
  replaced or restored at any time.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sam_connector.errors import StoreError
from sam_connector.storage.key import ManifestKey, StoreKey


class Outcome(enum.Enum):
    """What became of one value."""

    #: Written, read, refreshed, deleted; or it is there.
    DONE = enum.auto()
    #: It is not there; also if what is there has another length than asked for.
    MISSING = enum.auto()
    #: The store has no room for it; what is there can still be read.
    FULL = enum.auto()
    #: The store did not answer, or not with sense; nothing is known.
    FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One outcome for each value asked for, in the same order.

    Attributes:
        outcomes: as many as were asked for.
        error: why the first of those that FAILED did, or are FULL.
    """

    outcomes: Sequence[Outcome]
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in the caller's memory: the bytes of ``buffers``, one after another.

    Attributes:
        key: its name.
        buffers: contiguous, one-dimensional, of bytes; writable if they are read
            into. Their total length is the value's exact length.
    """

    key: StoreKey
    buffers: Sequence[memoryview]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.buffers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do beyond ``put``, ``get`` and ``exists``.

    Attributes:
        exact_ttl: a value is gone once its time is over, and not before unless the
            store needs the room.
        touch: ``touch`` lengthens lives; otherwise it only says what is there.
        delete: ``delete`` deletes; otherwise it answers MISSING for everything.
        is_shared: other processes see what is written.
        max_value_bytes: largest value it takes.
    """

    exact_ttl: bool
    touch: bool
    delete: bool
    is_shared: bool
    max_value_bytes: int


class StoreBackend(ABC):
    """Values that are written once and never change. See the module for the rules."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do; constant."""

    @abstractmethod
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        """Writes values that live for ``ttl_s`` seconds (more than 0).

        DONE only after the store has confirmed it. Where a value is there already,
        the one with the later end of life remains, and its life is not shortened.
        A reader sees all of a value or nothing.
        """

    @abstractmethod
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        """Reads values into the buffers of ``entries``.

        The buffers of whatever is not DONE may hold anything afterwards.
        """

    @abstractmethod
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        """Whether values are there; changes neither their life nor their order."""

    @abstractmethod
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        """Lets values live ``ttl_s`` seconds from now, or longer if they do anyway.

        Says in the same round trip whether they are there.
        """

    @abstractmethod
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        """Removes values; MISSING for those that were not there."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections; safe to call again. Calls under way fail."""


class WriteOutcome(enum.Enum):
    """What became of a manifest that was to be written."""

    DONE = enum.auto()
    #: What is there is as new or newer: another instance's, or a tombstone.
    OUTDATED = enum.auto()
    FULL = enum.auto()
    FAILED = enum.auto()


#: Scripts in stores calculate with doubles, which count no further.
MAX_VERSION = (1 << 53) - 1


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """What is stored under a manifest's name.

    Attributes:
        version: grows with every turn of the session; at most ``MAX_VERSION``.
        data: the manifest; empty for a tombstone.
    """

    version: int
    data: bytes

    @property
    def is_tombstone(self) -> bool:
        return not self.data


@dataclass(frozen=True, slots=True)
class ManifestRead:
    """Answer to a read: DONE with a record, MISSING, or FAILED."""

    outcome: Outcome
    record: ManifestRecord | None = None
    error: StoreError | None = None


class ManifestStore(ABC):
    """Small records that change: the newest version wins, whoever writes it.

    The rules of the module hold.
    """

    @abstractmethod
    def write(
        self,
        key: ManifestKey,
        record: ManifestRecord,
        *,
        ttl_s: float,
        deadline: float,
    ) -> WriteOutcome:
        """Writes a record unless there is one of the same or a later version.

        Atomic. A record without data is a tombstone: it keeps older versions from
        coming back for as long as it lives.
        """

    @abstractmethod
    def read(
        self, key: ManifestKey, *, max_bytes: int, deadline: float
    ) -> ManifestRead:
        """Reads a record; one of more than ``max_bytes`` of data counts as MISSING."""

    @abstractmethod
    def touch(self, key: ManifestKey, *, ttl_s: float, deadline: float) -> Outcome:
        """Lengthens a record's life to ``ttl_s`` from now, never shortens it."""

    @abstractmethod
    def close(self) -> None:
        """Ends connections; safe to call again."""
