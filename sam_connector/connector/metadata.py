"""What the scheduler side and the worker side tell each other each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from sam_connector.transfer.contract import CopyJob


@dataclass(frozen=True, slots=True)
class SAMConnectorMetadata(KVConnectorMetadata):
    """Copies to start in this step.

    Attributes:
        jobs: in the order in which they are to be started.
        request_ids: of the requests that wait for a load, by job id.
    """

    jobs: tuple[CopyJob, ...] = ()
    request_ids: Mapping[int, str] = field(default_factory=dict)


#: The same object every step in which there is nothing to copy.
EMPTY_METADATA = SAMConnectorMetadata()


class RankResult(NamedTuple):
    """One rank is done with one job; ``error`` says why it failed."""

    rank: int
    job_id: int
    error: str | None


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Jobs that ended since the last report.

    A set, because a job may be reported by several ranks in one step and each of
    them counts once: merging is associative, commutative and idempotent.
    """

    results: frozenset[RankResult]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.results | other.results)


@dataclass(frozen=True, slots=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank could allocate; the least of all counts."""

    num_slots: int
