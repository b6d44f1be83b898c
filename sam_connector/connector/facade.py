"""``SAMConnector``: what ``--kv-transfer-config`` names.

One class plays both of vLLM's roles, as its connector interface wants. The
scheduler role decides everything; the worker role copies bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from sam_connector.config import SamConfig
from sam_connector.connector.metadata import (
    EMPTY_METADATA,
    RankHandshake,
    SAMConnectorMetadata,
    WorkerReport,
)
from sam_connector.connector.metrics import StorePromMetrics, StoreStats
from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.connector.tier.build import engine_scope, open_guarded
from sam_connector.connector.worker import WorkerSide
from sam_connector.errors import ConfigurationError
from sam_connector.vllm_adapter import compat, plugin
from sam_connector.vllm_adapter.geometry import why_not_holdable

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SAMConnector(KVConnectorBase_V1, SupportsHMA):
    """Session-aware KV cache management for vLLM.

    Args:
        vllm_config: its ``kv_connector_extra_config`` holds our settings.
        role: scheduler or worker.
        kv_cache_config: geometry of the KV cache.
        **kwargs: what later versions of vLLM may add.

    Raises:
        ConfigurationError: the settings are wrong; names every problem.
        IncompatibleEngineError: this vLLM is not supported.
    """

    #: Where external hits come from, in vLLM's metrics.
    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        **kwargs: Any,
    ) -> None:
        compat.check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = _checked_config(self._kv_transfer_config)
        #: Set in the scheduler role, once the cache manager is bound.
        self.scheduler_side: SchedulerSide | None = None
        #: Set in the worker role, once the KV cache is there, if a tier needs it.
        self.worker_side: WorkerSide | None = None
        # Also when loaded through ``kv_connector_module_path``, without the plug-in.
        plugin.register()

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        """A best-effort cache: nobody waits for what it saves."""
        return False

    # --- scheduler role -------------------------------------------------------------

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side = SchedulerSide(
            kv_cache_manager, self.config, self._vllm_config, self._kv_cache_config
        )

    @override
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ours = [m.num_slots for m in metadata.values() if isinstance(m, RankHandshake)]
        if ours and self.scheduler_side is not None:
            self.scheduler_side.set_num_slots(min(ours))

    @override
    def on_new_request(self, request: Request) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.on_new_request(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler_side is None:
            return 0, False
        matched = self.scheduler_side.num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched, bool(matched)

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.on_blocks_assigned(request, blocks, num_external_tokens)

    @override
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        if self.scheduler_side is None:
            return EMPTY_METADATA
        return self.scheduler_side.on_step()

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport) and self.scheduler_side is not None:
            self.scheduler_side.on_report(report)

    @override
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_side is None:
            return False, None
        return False, self.scheduler_side.on_request_finished(request, block_ids)

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self.scheduler_side is None else self.scheduler_side.take_stats()

    @classmethod
    @override
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return StoreStats(data=data or {})

    @classmethod
    @override
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any) -> Any:
        transfer = vllm_config.kv_transfer_config
        if transfer is None or not transfer.kv_connector_extra_config.get("store"):
            return None
        return StorePromMetrics(vllm_config, *args)

    @override
    def has_pending_push_work(self) -> bool:
        return self.scheduler_side is not None and self.scheduler_side.has_pending_work

    @override
    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side is not None and self.scheduler_side.has_pinned_blocks

    def reset_cache(self) -> bool:
        """The cache's content is void, e.g. after a weight update."""
        if self.scheduler_side is not None:
            self.scheduler_side.reset()
        return True

    @override
    def shutdown(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.shutdown()
        if self.worker_side is not None:
            self.worker_side.close()

    # --- worker role ----------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self.config.host.is_enabled or not kv_caches:
            return
        if why_not_holdable(self._vllm_config, self._kv_cache_config) is not None:
            return  # the scheduler role says so, once
        if self.worker_side is not None:
            self.worker_side.close()
        parallel = self._vllm_config.parallel_config
        rank = parallel.rank % parallel.world_size
        store = None
        if self.config.store.is_enabled:
            scope = engine_scope(self._vllm_config)
            role = f"rank {rank}"
            opened, _ = open_guarded(self.config.store, role=role, scope=scope)
            store = opened.blocks
        self.worker_side = WorkerSide(
            kv_caches,
            self._kv_cache_config,
            self.config.host,
            rank=rank,
            num_ranks=parallel.world_size,
            store=store,
            store_config=self.config.store,
        )

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank has room for, where ranks may differ.

        With one pipeline stage all ranks are alike, and nothing is said: behind a
        ``MultiConnector`` only one connector is heard.
        """
        parallel = self._vllm_config.parallel_config
        if self.worker_side is None or parallel.pipeline_parallel_size == 1:
            return None
        return self.worker_side.handshake

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._copies()
        if metadata is not None and self.worker_side is not None:
            self.worker_side.start_loads(metadata)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    @override
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        return

    @override
    def wait_for_save(self) -> None:
        metadata = self._copies()
        if metadata is not None and self.worker_side is not None:
            self.worker_side.start_stores(metadata)

    @override
    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        if self.worker_side is None:
            return KVConnectorTransferResults()
        return self.worker_side.take_transfer_results()

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self.worker_side is None else self.worker_side.take_report()

    def _copies(self) -> SAMConnectorMetadata | None:
        """This step's metadata if it has copies to start."""
        metadata = self._connector_metadata
        if isinstance(metadata, SAMConnectorMetadata) and (
            metadata.jobs or metadata.store_jobs
        ):
            return metadata
        return None


def _checked_config(kv_transfer_config: KVTransferConfig) -> SamConfig:
    """Our settings; raises ``ConfigurationError`` with every problem there is."""
    extra_config = kv_transfer_config.kv_connector_extra_config
    problems: list[str] = []
    config = SamConfig()
    try:
        config = SamConfig.from_extra_config(extra_config)
    except ConfigurationError as error:
        problems += error.problems
    wants_tier = config.host.is_enabled or (problems and "host_bytes" in extra_config)
    policy = kv_transfer_config.kv_load_failure_policy
    # A load that fails must cost a prefill, not a request.
    if wants_tier and policy != "recompute":
        problems.append(
            "host_bytes needs kv_load_failure_policy to be recompute in "
            f"--kv-transfer-config; it is {policy!r}"
        )
    if problems:
        raise ConfigurationError(problems)
    return config
