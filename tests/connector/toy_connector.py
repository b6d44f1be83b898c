"""A small connector that is right, and wrong in the ways that a test asks for.

It saves the full blocks of every request that completes and loads them for the next
one that can use them, asynchronously, with a copy engine on each rank. Slots are
never given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from sam_connector.transfer.contract import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    JobResult,
)


@dataclass
class ToyMetadata(KVConnectorMetadata):
    jobs: list[tuple[str, CopyJob]] = field(default_factory=list)


@dataclass
class ToyHandshake(KVConnectorHandshakeMetadata):
    rank: int


@dataclass
class ToyReport(KVConnectorWorkerMetadata):
    """Which ranks have reported which jobs."""

    ended: list[tuple[int, JobResult]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ToyReport:
        assert isinstance(other, ToyReport)
        return ToyReport(self.ended + other.ended)


class ToyEngine(CopyEngine):
    """Copies at once, through a dictionary."""

    def __init__(self, caches: Sequence[dict[str, torch.Tensor]]) -> None:
        self._caches = caches
        self._slots: dict[tuple[int, str], torch.Tensor] = {}
        self._ended: list[JobResult] = []

    def submit(self, job: CopyJob) -> None:
        for part in job.parts:
            for block_id, slot in zip(part.block_ids, part.slots, strict=True):
                for name, cache in self._caches[part.group_id].items():
                    if job.direction is Direction.STORE:
                        self._slots[slot, name] = cache[block_id].clone()
                    else:
                        never_written = torch.zeros_like(cache[block_id])
                        cache[block_id] = self._slots.get((slot, name), never_written)
        self._ended.append(JobResult(job.job_id))

    def poll(self) -> list[JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    @property
    def num_in_flight(self) -> int:
        return 0

    def close(self) -> None:
        return


class ToyWorkerSide:
    def __init__(self, engine: CopyEngine) -> None:
        self.engine = engine
        self.jobs: dict[int, tuple[str, Direction]] = {}
        self.report: list[JobResult] = []


class ToyConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. ``extra_config["fault"]`` makes it wrong:

    - ``wrong_block``: loads go to the right blocks in the wrong order;
    - ``no_load``, ``rank_skips``: loads are reported and not done, by all or but one;
    - ``early_free``: blocks are given back while they are being saved;
    - ``early_hit``, ``one_rank``: content is offered before all have saved it.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.fault = self._kv_transfer_config.kv_connector_extra_config.get("fault")
        self.rank = vllm_config.parallel_config.rank
        self.world_size = vllm_config.parallel_config.world_size
        self.block_size = vllm_config.cache_config.block_size
        self.worker_side: ToyWorkerSide | None = None
        self.handshake: dict[tuple[int, int], Any] = {}
        self.num_loads = 0
        self._jobs: list[tuple[str, CopyJob]] = []
        self._num_jobs = 0
        self._num_slots = 0
        self._slots: dict[Any, list[int]] = {}
        self._saving: dict[int, tuple[set[int], dict[Any, list[int]]]] = {}
        self._failed: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --- scheduler role ---------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.handshake = metadata

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = num_computed_tokens // self.block_size
        count = 0
        if request.request_id not in self._failed:
            for block_hash in request.block_hashes[first:]:
                if block_hash not in self._slots:
                    break
                count += 1
        return count * self.block_size, count > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        count = num_external_tokens // self.block_size
        tables = blocks.get_block_ids()
        end = len(tables[0])
        if end * self.block_size > request.num_tokens:
            end = request.num_tokens // self.block_size
        hashes = request.block_hashes[end - count : end]
        parts = []
        for group_id, table in enumerate(tables):
            ids = table[end - count : end]
            if self.fault == "wrong_block":
                ids = ids[1:] + ids[:1]
            slots = [self._slots[block_hash][group_id] for block_hash in hashes]
            parts.append(GroupCopy(group_id, ids, slots))
        self.num_loads += 1
        self._submit(request.request_id, Direction.LOAD, tuple(parts))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        valid = request.num_computed_tokens - request.num_in_flight_tokens
        count = min(valid // self.block_size, len(request.block_hashes))
        fresh = [
            index
            for index in range(count)
            if request.block_hashes[index] not in self._slots
        ]
        if not fresh or not block_ids:
            return False, None
        saved: dict[Any, list[int]] = {request.block_hashes[i]: [] for i in fresh}
        parts = []
        for group_id, table in enumerate(block_ids):
            slots = self._take_slots(len(fresh))
            for block_hash, slot in zip(saved, slots, strict=True):
                saved[block_hash].append(slot)
            parts.append(GroupCopy(group_id, [table[i] for i in fresh], slots))
        job_id = self._submit(request.request_id, Direction.STORE, tuple(parts))
        self._saving[job_id] = set(range(self.world_size)), saved
        if self.fault == "early_hit":
            self._slots |= saved
        return self.fault != "early_free", None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        jobs, self._jobs = self._jobs, []
        return ToyMetadata(jobs)

    def update_connector_output(self, connector_output: Any) -> None:
        self._failed |= connector_output.failed_recving
        report = connector_output.kv_connector_worker_meta
        for rank, result in report.ended if report else ():
            if result.job_id not in self._saving:
                continue
            ranks, saved = self._saving[result.job_id]
            ranks.discard(rank)
            if result.error is not None:
                del self._saving[result.job_id]
            elif not ranks or self.fault == "one_rank":
                self._slots |= saved
                del self._saving[result.job_id]

    def has_pending_push_work(self) -> bool:
        return bool(self._saving or self._jobs)

    def _submit(self, request_id: str, direction: Direction, parts: Any) -> int:
        self._num_jobs += 1
        job = CopyJob(self._num_jobs, direction, parts)
        self._jobs.append((request_id, job))
        return job.job_id

    def _take_slots(self, count: int) -> list[int]:
        first, self._num_slots = self._num_slots, self._num_slots + count
        return list(range(first, self._num_slots))

    # --- worker role ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = [
            {name: kv_caches[name] for name in group.layer_names}
            for group in self._kv_cache_config.kv_cache_groups
        ]
        self.worker_side = ToyWorkerSide(ToyEngine(groups))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return ToyHandshake(self.rank)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        side = self.worker_side
        metadata = self._get_connector_metadata()
        assert side is not None
        assert isinstance(metadata, ToyMetadata)
        for request_id, job in metadata.jobs:
            side.jobs[job.job_id] = request_id, job.direction
            if job.direction is Direction.LOAD and (
                self.fault == "no_load" or (self.fault == "rank_skips" and self.rank)
            ):
                job = CopyJob(job.job_id, job.direction, ())
            side.engine.submit(job)

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        side = self.worker_side
        assert side is not None
        results = KVConnectorTransferResults()
        side.report = side.engine.poll()
        for result in side.report:
            request_id, direction = side.jobs.pop(result.job_id)
            if direction is Direction.STORE:
                if self.fault != "early_free":
                    results.finished_sending.add(request_id)
                continue
            results.finished_recving.add(request_id)
            if result.error is not None:
                results.failed_recving.add(request_id)
        return results

    def build_connector_worker_meta(self) -> ToyReport | None:
        side = self.worker_side
        assert side is not None
        return ToyReport([(self.rank, r) for r in side.report]) if side.report else None

    def shutdown(self) -> None:
        if self.worker_side is not None:
            self.worker_side.engine.close()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def request_finished(
        self, request: Any, block_ids: Iterable[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (list(block_ids),))
