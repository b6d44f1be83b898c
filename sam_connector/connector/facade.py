"""``SAMConnector``: what ``--kv-transfer-config`` names.

One class plays both of vLLM's roles, as its connector interface wants. The
scheduler role hosts the session-aware manager; the worker role has nothing to do
as long as no tier moves bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from sam_connector.config import SamConfig
from sam_connector.connector.metadata import EMPTY_METADATA
from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.vllm_adapter import compat, plugin

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
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

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        **kwargs: Any,
    ) -> None:
        compat.check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = SamConfig.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        #: Set in the scheduler role, once the cache manager is bound.
        self.scheduler_side: SchedulerSide | None = None
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
        self.scheduler_side = SchedulerSide(kv_cache_manager, self.config)

    @override
    def on_new_request(self, request: Request) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.on_new_request(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.on_blocks_assigned(request)

    @override
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        if self.scheduler_side is not None:
            self.scheduler_side.on_step()
        return EMPTY_METADATA

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
    def has_pending_push_work(self) -> bool:
        return self.scheduler_side is not None and self.scheduler_side.has_waiters

    def reset_cache(self) -> bool:
        """The cache's content is void, e.g. after a weight update."""
        if self.scheduler_side is not None:
            self.scheduler_side.reset()
        return True

    @override
    def shutdown(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.shutdown()

    # --- worker role ----------------------------------------------------------------

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

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
        return
