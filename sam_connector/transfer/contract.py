"""The port: what a copy engine promises, and the words to talk to it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


class Direction(enum.Enum):
    STORE = "store"  # device to host
    LOAD = "load"  # host to device

    @property
    def opposite(self) -> Direction:
        return Direction.LOAD if self is Direction.STORE else Direction.STORE


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Blocks of one KV cache group and the slot of each; equal lengths."""

    group_id: int
    block_ids: Sequence[int]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copies that finish, or fail, together.

    The engine reads it after ``submit`` has returned: nothing in it may change.
    """

    job_id: int
    direction: Direction
    parts: tuple[GroupCopy, ...]


@dataclass(frozen=True, slots=True)
class JobResult:
    """The end of a job; ``error`` says what went wrong, ``None`` that nothing did."""

    job_id: int
    error: str | None = None


class CopyEngine(ABC):
    """Moves blocks between the engine's regions and host slots, in the background.

    **Threads.** One thread, the worker's, calls everything here. Copies run elsewhere.

    **Blocking.** ``submit`` and ``poll`` return at once, however large the job and
    however many are queued. ``drain`` and ``close`` wait.

    **Completion.** Every submitted job is reported by ``poll`` exactly once, with an
    error or without. From the moment it is reported nothing of it is read or written
    any more: its slots and blocks may be used for anything. A STORE without an error
    has all its bytes in the slots; work that is given to the device's current stream
    after a LOAD was reported sees all its bytes in the blocks.

    **Order.** Guaranteed, in terms of the bytes:

    - A job reads and writes blocks after all work that was on the device's current
      stream when it was submitted, and only then. So a STORE sees what a kernel that
      was launched before wrote, and a LOAD does not disturb one that still reads.
    - Jobs of one direction run in the order they were submitted in.
    - Jobs of opposite directions that share a slot or a block id do, too: a LOAD sees
      the bytes of an earlier STORE to its slot; a later STORE neither overwrites a
      slot before an earlier LOAD has read it, nor reads a block before an earlier
      LOAD has filled it. Others overlap and overtake each other freely.

    Not guaranteed: anything about work that is given to the current stream, or done
    by the host, while a job is in flight. The caller pins the blocks and slots of a
    job until it is reported.

    **Failure.** Nothing here raises for a bad job. A job with an id out of range, lists
    of different lengths, an unknown group, a destination named twice, or for an engine
    that is closed, is reported with an error and *nothing* of it is copied. When the
    copying itself fails, what the destinations hold is undefined.
    """

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Queue a job; ``job_id`` is the caller's and returned as it is."""

    @abstractmethod
    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call; works after ``close`` as well."""

    @abstractmethod
    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every submitted job has ended; results stay to be polled.

        Args:
            timeout_s: give up after this long; ``None`` waits for ever.

        Returns:
            Whether every job has ended.
        """

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Jobs that have not ended; those that only wait for ``poll`` are not in it.

        A device is asked when ``poll`` or ``drain`` is called, so this may be late.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what has begun, fail what has not, join threads; idempotent.

        Regions and pool must live until it returns.
        """
