"""What the roles of ``SPMConnector`` tell each other beside the inner one's words."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

#: Begins the ids of requests that only the inner connector knows.
REQUEST_PREFIX = "sam-spm-"


def job_of(request_id: str) -> int:
    """A request of ours has the number of its job."""
    return int(request_id.removeprefix(REQUEST_PREFIX))


class JobKind(enum.Enum):
    LOAD = "load"
    SAVE = "save"
    #: What the inner connector saves of the step's own requests.
    STEP_SAVES = "step_saves"


class SpmJob(NamedTuple):
    """Something the ranks are to report the end of.

    Attributes:
        request_id: what the inner connector knows a load or save by.
        block_ids: that a load writes.
        is_async: the inner connector says when it has ended.
    """

    job_id: int
    kind: JobKind
    request_id: str = ""
    block_ids: tuple[int, ...] = ()
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class SpmMetadata(KVConnectorMetadata):
    """One step.

    Attributes:
        inner: the inner connector's own; ``None`` if it could not build it.
        jobs: that begin in this step.
        sync_blocks: that it loads in this step for the engine's requests.
        async_requests: whose loads it begins in this step.
    """

    inner: KVConnectorMetadata | None
    jobs: tuple[SpmJob, ...] = ()
    sync_blocks: frozenset[int] = frozenset()
    async_requests: frozenset[str] = frozenset()


class SpmResult(NamedTuple):
    """One rank is done with one job; ``error`` says why it failed."""

    rank: int
    job_id: int
    error: str | None


@dataclass(frozen=True, slots=True)
class SpmReport(KVConnectorWorkerMetadata):
    """Jobs that ended, and the inner connector's own report."""

    results: frozenset[SpmResult] = frozenset()
    inner: KVConnectorWorkerMetadata | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SpmReport:
        assert isinstance(other, SpmReport)
        inner = self.inner or other.inner
        if self.inner is not None and other.inner is not None:
            inner = self.inner.aggregate(other.inner)
        return SpmReport(self.results | other.results, inner)
