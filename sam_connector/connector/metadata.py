"""What the scheduler side and the worker side tell each other each step."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from sam_connector.transfer.contract import CopyJob


class StoreDirection(enum.Enum):
    READ = "read"  # store to host
    WRITE = "write"  # host to store


class StoreValue(NamedTuple):
    """Blocks that are one value in the store, and the slot of each.

    ``block_hash`` is the last block's. A slot of -1 stands for a block that is read
    and thrown away, because it is there already.
    """

    group_id: int
    block_hash: bytes
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Values to read or write, first values of a sequence first.

    Attributes:
        urgency: jobs with a lower one go first.
        fingerprint: part of the values' names.
        tenant: whose they are.
        num_parts: into how many values each block is cut.
    """

    job_id: int
    direction: StoreDirection
    urgency: int
    fingerprint: str
    tenant: str
    num_parts: int
    values: tuple[StoreValue, ...]


@dataclass(frozen=True, slots=True)
class SAMConnectorMetadata(KVConnectorMetadata):
    """Copies to start in this step.

    Attributes:
        jobs: in the order in which they are to be started.
        request_ids: of the requests that wait for a load, by job id.
        store_jobs: the same between slots and the store.
    """

    jobs: tuple[CopyJob, ...] = ()
    request_ids: Mapping[int, str] = field(default_factory=dict)
    store_jobs: tuple[StoreJob, ...] = ()


#: The same object every step in which there is nothing to copy.
EMPTY_METADATA = SAMConnectorMetadata()


class RankResult(NamedTuple):
    """One rank is done with one job; ``error`` says why it failed."""

    rank: int
    job_id: int
    error: str | None


class StoreResult(NamedTuple):
    """One rank is done with one store job.

    Attributes:
        failed: positions of values that were not read or not written.
        missing: those of them that the store has not.
        error: why the first of the others failed.
    """

    rank: int
    job_id: int
    failed: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Jobs that ended since the last report.

    A set, because a job may be reported by several ranks in one step and each of
    them counts once: merging is associative, commutative and idempotent.
    """

    results: frozenset[RankResult] = frozenset()
    store_results: frozenset[StoreResult] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.results | other.results, self.store_results | other.store_results
        )


@dataclass(frozen=True, slots=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank could allocate; the least of all counts."""

    num_slots: int
