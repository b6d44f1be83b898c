"""Puts the tier together for an engine, and the inner connector before it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from sam_connector.connector.spm.config import SpmConfig
from sam_connector.connector.spm.inner import InnerScheduler
from sam_connector.connector.spm.tier import SpmTier
from sam_connector.core.clock import MonotonicClock
from sam_connector.core.types import GroupId
from sam_connector.errors import ConfigurationError
from sam_connector.vllm_adapter import compat
from sam_connector.vllm_adapter.chains import ChainReader
from sam_connector.vllm_adapter.geometry import (
    record_bytes,
    region_specs,
    why_not_holdable,
)
from sam_connector.vllm_adapter.gpu_cache import GpuCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_GROUP = GroupId(0)


def with_extra_config(
    vllm_config: VllmConfig, extra_config: Mapping[str, Any]
) -> VllmConfig:
    """The engine's configuration with other settings of its connector."""
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert changed.kv_transfer_config is not None
    changed.kv_transfer_config.kv_connector_extra_config = dict(extra_config)
    return changed


def inner_transfer_config(
    outer: KVTransferConfig, inner: Mapping[str, Any]
) -> KVTransferConfig:
    """What ``--kv-transfer-config`` would be with the inner connector alone."""
    return KVTransferConfig(
        **{
            "kv_role": outer.kv_role,
            "kv_port": outer.kv_port,
            "kv_buffer_device": outer.kv_buffer_device,
            **inner,
            "engine_id": outer.engine_id,
            "kv_load_failure_policy": outer.kv_load_failure_policy,
        }
    )


def build_inner(
    config: SpmConfig,
    vllm_config: VllmConfig,
    role: KVConnectorRole,
    kv_cache_config: KVCacheConfig,
) -> KVConnectorBase_V1:
    """The inner connector.

    Raises:
        ConfigurationError: there is no such connector, or it cannot serve this model.
    """
    outer = vllm_config.kv_transfer_config
    assert outer is not None
    inner_config = copy.copy(vllm_config)
    inner_config.kv_transfer_config = inner_transfer_config(outer, config.inner)
    try:
        cls = KVConnectorFactory.get_connector_class(inner_config.kv_transfer_config)
        knows_groups = KVConnectorFactory.supports_hma_config(
            inner_config.kv_transfer_config
        )
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigurationError([f"inner {config.inner_name}: {error}"]) from error
    if not knows_groups:
        num_groups = len(kv_cache_config.kv_cache_groups)
        if num_groups > 1:
            raise ConfigurationError(
                [
                    f"inner {config.inner_name} knows one KV cache group, and this "
                    f"model has {num_groups}; start with "
                    "--disable-hybrid-kv-cache-manager"
                ]
            )
        # vLLM would have said so, had it been asked for this connector alone.
        inner_config.scheduler_config = copy.copy(vllm_config.scheduler_config)
        inner_config.scheduler_config.disable_hybrid_kv_cache_manager = True
    connector: KVConnectorBase_V1 = cls(inner_config, role, kv_cache_config)
    return connector


def build_tier(
    config: SpmConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_cache_manager: KVCacheManager,
    inner: InnerScheduler,
    *,
    prefetch_reserve: float,
) -> SpmTier:
    """The tier of an engine."""
    chains = ChainReader(kv_cache_manager)
    reason = _why_no_transfers(
        config, vllm_config, kv_cache_config, kv_cache_manager, chains
    )
    num_ranks = vllm_config.parallel_config.world_size
    block_bytes = 0
    if reason is None:
        block_bytes = record_bytes(region_specs(kv_cache_config)[_GROUP]) * num_ranks
    tier = SpmTier(
        kv_cache_manager,
        inner,
        config,
        GpuCache(
            kv_cache_manager.block_pool, chains.block_sizes, reserve=prefetch_reserve
        ),
        chains,
        MonotonicClock(),
        block_bytes=block_bytes,
        num_ranks=num_ranks,
        no_transfers=reason,
    )
    can = ", ".join(sorted(tier.session_capabilities))
    logger.info("sessions of %s: it can be made to %s", config.inner_name, can)
    if reason is not None:
        logger.warning("%s gets no requests of ours: %s", config.inner_name, reason)
    return tier


def _why_no_transfers(
    config: SpmConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_cache_manager: KVCacheManager,
    chains: ChainReader,
) -> str | None:
    if not kv_cache_manager.enable_caching:
        return "prefix caching is off"
    if len(kv_cache_config.kv_cache_groups) != 1:
        return f"this model has {len(kv_cache_config.kv_cache_groups)} KV cache groups"
    missing = compat.missing_for_tier(kv_cache_manager)
    if missing:
        return f"this vLLM has changed {', '.join(missing)}"
    if kv_cache_manager.block_pool.hash_block_size != chains.primary_block_size:
        return "its blocks and what is hashed differ in size"
    (group,) = kv_cache_config.kv_cache_groups
    is_mla = isinstance(group.kv_cache_spec, MLAAttentionSpec)
    if is_mla and not config.traits.supports_mla:
        return "it has latent attention, which this connector handles only in a step"
    return why_not_holdable(vllm_config, kv_cache_config, kv_cache_manager)
