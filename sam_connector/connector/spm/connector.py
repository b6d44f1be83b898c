"""``SPMConnector``: an existing KV connector, with sessions.

It includes ``SAMConnector``, so that one flag gives both. Towards vLLM it is the inner
connector: what that answers is what vLLM hears, as far as the engine survives it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from sam_connector.connector.facade import SAMConnector
from sam_connector.connector.spm.build import (
    build_inner,
    build_tier,
    inner_transfer_config,
    with_extra_config,
)
from sam_connector.connector.spm.config import SpmConfig
from sam_connector.connector.spm.inner import InnerScheduler
from sam_connector.connector.spm.metadata import SpmMetadata, SpmReport
from sam_connector.connector.spm.requests import StepPlan
from sam_connector.connector.spm.synthetic import inner_view
from sam_connector.connector.spm.tier import SpmTier
from sam_connector.connector.spm.transfers import Begun
from sam_connector.connector.spm.worker import SpmWorker
from sam_connector.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SPMConnector(SAMConnector):
    """Session-aware KV cache management over another connector.

    Args:
        vllm_config: its ``kv_connector_extra_config`` names the inner connector.
        role: scheduler or worker.
        kv_cache_config: geometry of the KV cache.
        **kwargs: what later versions of vLLM may add.

    Raises:
        ConfigurationError: the settings are wrong; names every problem.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        **kwargs: Any,
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self.spm_config, rest = _checked_config(vllm_config.kv_transfer_config)
        super().__init__(
            with_extra_config(vllm_config, rest), role, kv_cache_config, **kwargs
        )
        self.inner = build_inner(self.spm_config, vllm_config, role, kv_cache_config)
        self._inner_scheduler = InnerScheduler(self.inner)
        #: Set in the scheduler role, once the cache manager is bound.
        self.spm_tier: SpmTier | None = None
        #: Our own part has failed; the inner connector gets no requests to load for.
        self._is_abandoned = False
        #: The inner connector has failed, and is not called any more.
        self._inner_is_off = False
        parallel = vllm_config.parallel_config
        self._worker = SpmWorker(
            self.inner,
            rank=parallel.rank % parallel.world_size,
            num_blocks=kv_cache_config.num_blocks,
            failed_load_wait_s=self.spm_config.failed_load_wait_s,
        )

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        return bool(self.inner.requires_kv_delivery)

    @property
    @override
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return bool(self.inner.supports_divergent_local_hybrid_hits)

    @classmethod
    @override
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        assert vllm_config.kv_transfer_config is not None
        config, _ = SpmConfig.split(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        inner = copy.copy(vllm_config)
        inner.kv_transfer_config = inner_transfer_config(
            vllm_config.kv_transfer_config, config.inner
        )
        inner_class = KVConnectorFactory.get_connector_class(inner.kv_transfer_config)
        layout: str | None = inner_class.get_required_kvcache_layout(inner)
        return layout

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        config, _ = SpmConfig.split(extra_config)
        settings = {"kv_role": "kv_both", **config.inner}
        inner_class = KVConnectorFactory.get_connector_class(
            _transfer_config_of(settings)
        )
        return bool(
            inner_class.requires_piecewise_for_cudagraph(
                dict(config.inner.get("kv_connector_extra_config", {}))
            )
        )

    # --- scheduler role -------------------------------------------------------------

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.inner.bind_kv_cache_manager(kv_cache_manager)
        self.spm_tier = build_tier(
            self.spm_config,
            self._vllm_config,
            self._kv_cache_config,
            kv_cache_manager,
            self._inner_scheduler,
            prefetch_reserve=self.config.host.prefetch_reserve,
        )
        side = self.scheduler_side
        if side is not None and side.host is not None:
            self.spm_tier.directory = side.host.manager.directory

    @override
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.inner.set_xfer_handshake_metadata_pp_aware(metadata)

    @override
    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self.spm_tier is not None:
            self.spm_tier.watch.add(request)
        if not self._inner_is_off:
            with self._inner_scheduler.lock:
                self.inner.on_new_request(request)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tier = self.spm_tier
        if self._is_abandoned or self._inner_is_off:
            return 0, False
        if tier is not None and not tier.watch.may_load(request):
            return 0, False
        try:
            with self._inner_scheduler.lock:
                matched, is_async = self.inner.get_num_new_matched_tokens(
                    request, num_computed_tokens
                )
        except Exception:
            logger.warning("a look-up of the inner connector failed", exc_info=True)
            return 0, False
        if matched is None or tier is None:
            return matched, is_async
        return self._guarded(
            (0, False),
            tier.watch.checked_match,
            request,
            num_computed_tokens,
            matched,
            is_async,
        )

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.spm_tier is not None and num_external_tokens:
            watch = self.spm_tier.watch
            block_ids = blocks.get_block_ids()[watch.group_id]
            self._guarded(None, watch.add_load, request, block_ids, num_external_tokens)
        if not self._inner_is_off:
            with self._inner_scheduler.lock:
                self.inner.update_state_after_alloc(
                    request, blocks, num_external_tokens
                )

    @override
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(self.inner.get_loaded_kv_cache_group_ids(request))

    @override
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        sources: dict[CacheHitSource, int] = self.inner.get_external_cache_hit_sources(
            request, num_external_tokens
        )
        return sources

    @override
    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        side, tier = self.scheduler_side, self.spm_tier
        host = None if side is None else side.host
        if side and host and tier is not None and tier.has_events:
            side.guarded(host.hear_tiers)
        super().build_connector_meta(scheduler_output)
        with self._inner_scheduler.lock:
            plan, begun = StepPlan(), Begun()
            is_on = not (self._is_abandoned or self._inner_is_off)
            if self.spm_tier is not None and is_on:
                if side is not None and side.waker.is_paused:
                    # Its memory may be gone; and a pause waits for what is pending.
                    self.spm_tier.transfers.cancel(None, "the engine is paused")
                plan, begun = self._guarded(
                    (plan, begun), self.spm_tier.begin_step, scheduler_output
                )
            ended, self._inner_scheduler.ended = self._inner_scheduler.ended, set()
            view = inner_view(
                scheduler_output,
                added=begun.requests,
                hidden=plan.hidden,
                ended=ended,
            )
            return SpmMetadata(
                inner=self._inner_meta(view),
                jobs=tuple(begun.jobs),
                sync_blocks=frozenset(plan.sync_blocks),
                async_requests=frozenset(plan.async_requests),
            )

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        tier = self.spm_tier
        with self._inner_scheduler.lock:
            inner_output = copy.copy(connector_output)
            if isinstance(report, SpmReport):
                inner_output.kv_connector_worker_meta = report.inner
            self.inner.update_connector_output(inner_output)
            if tier is None:
                return
            self._guarded(
                None,
                tier.on_failures,
                connector_output.invalid_block_ids,
                connector_output.failed_recving,
            )
            if isinstance(report, SpmReport):
                self._guarded(None, tier.on_results, report.results)

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        with self._inner_scheduler.lock:
            delays, inner_params = False, None
            if not self._inner_is_off:
                delays, inner_params = self._inner_scheduler.request_finished(
                    request, block_ids
                )
            tier = self.spm_tier
            if tier is not None:
                tier.on_finishing(request)
            _, params = super().request_finished_all_groups(request, block_ids)
            if tier is not None:
                tier.on_finished(request)
        if params is None or inner_params is None:
            return delays, params or inner_params
        return delays, {**inner_params, **params}

    @override
    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> bool:
        return bool(self.inner.register_finished_partial_tail(*args, **kwargs))

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        events: Iterable[KVCacheEvent] = self.inner.take_events()
        return events

    @override
    def has_pending_push_work(self) -> bool:
        return (
            super().has_pending_push_work()
            or (self.spm_tier is not None and self.spm_tier.has_pending)
            or (not self._inner_is_off and bool(self.inner.has_pending_push_work()))
        )

    @override
    def has_pending_block_frees(self) -> bool:
        tier = self.spm_tier
        if tier is not None and tier.transfers.has_pinned:
            return True
        return not self._inner_is_off and bool(self.inner.has_pending_block_frees())

    @override
    def reset_cache(self) -> bool:
        super().reset_cache()
        with self._inner_scheduler.lock:
            if self.spm_tier is not None:
                self._guarded(None, self.spm_tier.reset)
            return self.inner.reset_cache() is not False

    @override
    def shutdown(self) -> None:
        super().shutdown()
        if self.spm_tier is not None:
            self.spm_tier.close()
        self.inner.shutdown()  # type: ignore[no-untyped-call]

    # --- worker role ----------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    @override
    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self.inner.get_mem_pool_context()

    @override
    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.inner.set_host_xfer_buffer_ops(copy_operation)

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.inner.get_handshake_metadata()

    @override
    def get_finished_count(self) -> int | None:
        count: int | None = self.inner.get_finished_count()
        return count

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, SpmMetadata):
            self._worker.begin(connector_metadata)

    @override
    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.end()

    @override
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, SpmMetadata):
            self._worker.handle_preemptions(kv_connector_metadata)

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_loads(forward_context, **kwargs)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer_load(layer_name)

    @override
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> None:
        self._worker.save_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    @override
    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    @override
    def finish_forward(self) -> None:
        self.inner.finish_forward()

    @override
    def reset_capture_state(self) -> None:
        self.inner.reset_capture_state()

    @override
    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        return self._worker.take_transfer_results(finished_req_ids)

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()

    # --- internals --------------------------------------------------------------------

    def _inner_meta(self, view: Any) -> KVConnectorMetadata | None:
        if self._inner_is_off:
            return None
        try:
            meta: KVConnectorMetadata = self.inner.build_connector_meta(view)
        except Exception:
            # What it was about to load it might load later, into blocks that are
            # others' by then.
            logger.exception("the inner connector is off: it could not plan a step")
            self._inner_is_off = True
            if self.spm_tier is not None:
                self.spm_tier.abandon("the inner connector is off after an error")
            return None
        return meta

    def _guarded(self, default: T, call: Callable[..., T], *args: Any) -> T:
        """What goes wrong in our own code must not reach the scheduler."""
        try:
            return call(*args)
        except Exception:
            logger.exception("sessions are off after an internal error")
            if self.spm_tier is not None and not self._is_abandoned:
                self._is_abandoned = True
                self.spm_tier.abandon("it is off after an internal error")
            return default


def _transfer_config_of(settings: dict[str, Any]) -> KVTransferConfig:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**settings)


def _checked_config(
    transfer_config: KVTransferConfig,
) -> tuple[SpmConfig, dict[str, Any]]:
    """Our settings and what is left for the session manager.

    Raises:
        ConfigurationError: with every problem there is.
    """
    problems: list[str] = []
    parts: tuple[SpmConfig, dict[str, Any]] = SpmConfig(), {}
    try:
        parts = SpmConfig.split(transfer_config.kv_connector_extra_config)
    except ConfigurationError as error:
        problems += error.problems
    policy = transfer_config.kv_load_failure_policy
    if policy != "recompute":
        problems.append(
            "SPMConnector needs kv_load_failure_policy to be recompute in "
            f"--kv-transfer-config; it is {policy!r}"
        )
    if problems:
        raise ConfigurationError(problems)
    return parts
