"""The worker role: one rank's copies between its KV cache and its host slots.

Decides nothing. What goes wrong is reported and never raised: the scheduler side
turns it into a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)

from sam_connector.config import HostTierConfig, StoreConfig
from sam_connector.connector.metadata import (
    RankHandshake,
    RankResult,
    SAMConnectorMetadata,
    WorkerReport,
)
from sam_connector.connector.store_io import StoreIo
from sam_connector.errors import ConfigurationError
from sam_connector.storage.port import StoreBackend
from sam_connector.transfer.contract import CopyEngine, Direction, JobResult
from sam_connector.transfer.engine import make_copy_engine
from sam_connector.transfer.host_pool import HostPool
from sam_connector.transfer.layout import SlotLayout
from sam_connector.vllm_adapter.geometry import RegionSpec, region_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

#: Longest wait for copies at the end of a step.
_MAX_DRAIN_S = 0.05


class WorkerSide:
    """Copies of one rank.

    Args:
        kv_caches: the engine's tensors by layer.
        kv_cache_config: how they are laid out.
        config: settings.
        rank: of this worker among all that copy.
        num_ranks: how many those are.
        store: what is behind the slots, if anything.
        store_config: its settings.

    Raises:
        ConfigurationError: the host memory asked for is too little or not there.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        kv_cache_config: KVCacheConfig,
        config: HostTierConfig,
        *,
        rank: int,
        num_ranks: int,
        store: StoreBackend | None = None,
        store_config: StoreConfig | None = None,
    ) -> None:
        self._rank = rank
        groups = {
            int(group_id): [
                _region(kv_caches[spec.layer], spec, kv_cache_config.num_blocks)
                for spec in specs
            ]
            for group_id, specs in region_specs(kv_cache_config).items()
        }
        layout = SlotLayout.of(groups)
        device = next(iter(kv_caches.values())).device
        num_slots = config.num_slots(layout.slot_bytes, num_ranks)
        if not num_slots:
            raise ConfigurationError(
                [
                    f"host_bytes is too little for one block: {config.host_bytes} "
                    f"bytes for {num_ranks} ranks, {layout.slot_bytes} bytes a block"
                ]
            )
        try:
            self.pool = HostPool(
                num_slots, layout.slot_bytes, pin=device.type == "cuda"
            )
        except MemoryError as error:
            raise ConfigurationError([f"host_bytes: {error}"]) from error
        #: Copies in the background.
        self.engine: CopyEngine = make_copy_engine(
            groups, layout, self.pool, device=device, num_threads=config.copy_threads
        )
        #: On a CPU the forward pass is over when copies start, and the cores that
        #: copy are those that compute: to finish at once spares a request that loads
        #: the wait for another step. A GPU copies while it computes.
        self._finishes_in_step = device.type == "cpu"
        self._io: StoreIo | None = None
        if store is not None and store_config is not None:
            self._io = StoreIo(
                store,
                self.pool,
                {group_id: layout.record_bytes(group_id) for group_id in groups},
                rank=rank,
                num_threads=store_config.store_threads,
                timeout_s=store_config.store_timeout_s,
                ttl_s=store_config.store_ttl_s,
            )
        self._request_ids: dict[int, str] = {}
        self._refused: list[JobResult] = []
        self._results: list[RankResult] = []
        logger.info(
            "host tier: %d slots of %d bytes on rank %d, %s",
            num_slots,
            layout.slot_bytes,
            rank,
            "pinned" if self.pool.is_pinned else "not pinned",
        )

    @property
    def handshake(self) -> RankHandshake:
        return RankHandshake(num_slots=self.pool.num_slots)

    def start_loads(self, metadata: SAMConnectorMetadata) -> None:
        self._request_ids.update(metadata.request_ids)
        if self._io is not None:
            for job in metadata.store_jobs:
                self._io.submit(job)
        self._submit(metadata, Direction.LOAD)

    def start_stores(self, metadata: SAMConnectorMetadata) -> None:
        """Called after the forward pass that computes what is stored."""
        self._submit(metadata, Direction.STORE)

    def take_transfer_results(self) -> KVConnectorTransferResults:
        """Requests whose loads have ended; a failed one is in both sets."""
        if self._finishes_in_step and self.engine.num_in_flight:
            self.engine.drain(_MAX_DRAIN_S)
        received: set[str] = set()
        failed: set[str] = set()
        refused, self._refused = self._refused, []
        for result in (*refused, *self.engine.poll()):
            request_id = self._request_ids.pop(result.job_id, None)
            if result.error is not None:
                logger.warning("copy failed: %s", result.error)
            if request_id is not None:
                received.add(request_id)
                if result.error is not None:
                    failed.add(request_id)
            self._results.append(RankResult(self._rank, result.job_id, result.error))
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=received, failed_recving=failed
        )

    def take_report(self) -> WorkerReport | None:
        """All jobs that ended since the last call."""
        store_results = [] if self._io is None else self._io.poll()
        if not self._results and not store_results:
            return None
        results, self._results = self._results, []
        return WorkerReport(frozenset(results), frozenset(store_results))

    def close(self) -> None:
        if self._io is not None:
            self._io.close()
            if not self._io.is_stopped:
                return  # a store that does not let go of slots: they stay mapped
        self.engine.close()
        self.pool.close()

    def _submit(self, metadata: SAMConnectorMetadata, direction: Direction) -> None:
        for job in metadata.jobs:
            if job.direction is direction:
                try:
                    self.engine.submit(job)
                except Exception as error:
                    self._refused.append(JobResult(job.job_id, repr(error)))


def _region(layer: torch.Tensor, spec: RegionSpec, num_blocks: int) -> torch.Tensor:
    """One region as bytes, ``[num_blocks, block_bytes]``."""
    raw = torch.empty(0, dtype=torch.uint8, device=layer.device)
    raw.set_(layer.untyped_storage())
    return raw.as_strided((num_blocks, spec.block_bytes), (spec.stride, 1), spec.start)
