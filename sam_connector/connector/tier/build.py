"""Puts a host tier together for an engine, or says why there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sam_connector.config import HostTierConfig, StoreConfig
from sam_connector.connector.tier.host_tier import HostTier
from sam_connector.connector.tier.jobs import JobTable
from sam_connector.connector.tier.state import TierState
from sam_connector.connector.tier.store_tier import DEFAULT_TENANT, StoreTier
from sam_connector.connector.tier.values import ValueShape
from sam_connector.core.clock import Clock, MonotonicClock
from sam_connector.core.slot_pool import SlotPool
from sam_connector.core.tier_contexts import TierContexts
from sam_connector.pooling.config import PoolingConfig
from sam_connector.pooling.key_space import KeySpace
from sam_connector.pooling.manager import SessionPoolingManager
from sam_connector.storage.guard import CircuitBreaker, GuardedManifests, GuardedStore
from sam_connector.storage.registry import OpenStore, StoreOptions, open_store, redact
from sam_connector.transfer.layout import aligned
from sam_connector.vllm_adapter import compat
from sam_connector.vllm_adapter.chains import ChainReader
from sam_connector.vllm_adapter.fingerprint import fingerprint
from sam_connector.vllm_adapter.geometry import (
    record_bytes,
    region_specs,
    why_not_holdable,
)
from sam_connector.vllm_adapter.gpu_cache import GpuCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

#: Steps whose allocations demotion stays ahead of.
_DEMOTION_STEPS = 2


def build_host_tier(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_cache_manager: KVCacheManager,
    config: HostTierConfig,
    *,
    store_config: StoreConfig | None = None,
    max_protected_fraction: float,
    num_slots: int | None = None,
    wake: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> HostTier | None:
    """The tier of an engine; ``None`` if it is off or cannot hold this model.

    Args:
        vllm_config: the engine's.
        kv_cache_config: geometry of the cache, as the first rank has it.
        kv_cache_manager: the engine's, with its block pool.
        config: settings.
        store_config: settings of the store behind it, if there is to be one.
        max_protected_fraction: share of the slots that leases may protect.
        num_slots: what every rank has room for, where that is known.
        wake: has an idle engine take a step; from any thread.
        clock: where time comes from.
    """
    if not config.is_enabled or not kv_cache_manager.enable_caching:
        return None
    missing = compat.missing_for_tier(kv_cache_manager)
    if missing:
        logger.error(
            "the host tier is off: this vLLM (%s) has changed %s",
            compat.vllm_version(),
            ", ".join(missing),
        )
        return None
    reason = why_not_holdable(vllm_config, kv_cache_config, kv_cache_manager)
    if reason is not None:
        logger.warning("this model is served without the host tier: %s", reason)
        return None
    num_ranks = vllm_config.parallel_config.world_size
    records = {
        group_id: record_bytes(specs)
        for group_id, specs in region_specs(kv_cache_config).items()
    }
    if num_slots is None:
        num_slots = config.num_slots(aligned(max(records.values())), num_ranks)
    if not num_slots:
        return None  # the ranks have refused to start
    chains = ChainReader(kv_cache_manager)
    slots = SlotPool(num_slots)
    pool = kv_cache_manager.block_pool
    largest = max(records.values()) * num_ranks
    state = TierState(
        gpu=GpuCache(pool, chains.block_sizes, reserve=config.prefetch_reserve),
        slots=slots,
        contexts=TierContexts(
            slots, max_protected=int(num_slots * max_protected_fraction)
        ),
        jobs=JobTable(num_ranks),
        config=config,
        clock=clock or MonotonicClock(),
        block_bytes={group_id: size * num_ranks for group_id, size in records.items()},
        max_inflight_blocks=max(
            1, min(config.max_inflight_bytes // largest, pool.num_gpu_blocks // 4)
        ),
    )
    if store_config is not None and store_config.is_enabled:
        shape = ValueShape.of(records, store_config)
        state.remote = _build_store(
            state,
            store_config,
            shape,
            chains,
            fingerprint=fingerprint(
                vllm_config,
                kv_cache_config,
                namespace=store_config.store_namespace,
                blocks_per_value=shape.num_blocks,
            ),
            scope=engine_scope(vllm_config),
            num_ranks=num_ranks,
            wake=wake,
        )
    scheduler = vllm_config.scheduler_config
    window = -(-scheduler.max_num_batched_tokens // chains.primary_block_size)
    logger.info(
        "host tier: %d blocks of %d tokens, %.2f GiB on %d rank(s), save policy %s",
        num_slots,
        chains.primary_block_size,
        num_slots * largest / (1 << 30),
        num_ranks,
        config.save_policy,
    )
    return HostTier(
        state,
        chains,
        demotion_window=min(_DEMOTION_STEPS * window, pool.num_gpu_blocks // 2),
    )


def engine_scope(vllm_config: VllmConfig) -> str:
    """What the processes of one engine have in common, and no other engine has."""
    transfer = vllm_config.kv_transfer_config
    engine_id = "" if transfer is None else str(transfer.engine_id)
    return f"{engine_id}-{vllm_config.parallel_config.data_parallel_index}"


def open_guarded(
    config: StoreConfig,
    *,
    role: str,
    scope: str,
    on_change: Callable[[], None] = lambda: None,
) -> tuple[OpenStore, CircuitBreaker]:
    """The configured store behind a breaker; connects to nothing yet.

    Args:
        config: settings.
        role: whose breaker it is, for the log.
        scope: of the engine.
        on_change: called when the breaker opens or closes, from any thread.
    """
    opened = open_store(
        config.store,
        StoreOptions(num_connections=config.store_threads, scope=scope),
    )
    breaker = CircuitBreaker(
        f"{redact(config.store)} ({role})", MonotonicClock(), on_change=on_change
    )
    manifests = opened.manifests
    guarded = OpenStore(
        GuardedStore(opened.blocks, breaker),
        None if manifests is None else GuardedManifests(manifests, breaker),
    )
    return guarded, breaker


def _build_store(
    state: TierState,
    config: StoreConfig,
    shape: ValueShape,
    chains: ChainReader,
    *,
    fingerprint: str,
    scope: str,
    num_ranks: int,
    wake: Callable[[], None],
) -> StoreTier:
    opened, breaker = open_guarded(
        config,
        role="scheduler",
        scope=scope,
        on_change=wake,  # an idle engine's metrics are those of its last step
    )
    spm = SessionPoolingManager(
        opened.blocks,
        opened.manifests,
        KeySpace(
            tenant=DEFAULT_TENANT,
            fingerprint=fingerprint,
            num_ranks=num_ranks,
            num_parts=shape.num_parts,
        ),
        PoolingConfig(
            ttl_s=config.store_ttl_s,
            keep_alive_interval_s=config.store_keep_alive_s,
            lookup_timeout_s=config.store_lookup_timeout_s,
            call_timeout_s=config.store_timeout_s,
        ),
        block_sizes=chains.block_sizes,
        clock=state.clock,
        wake=wake,
    )
    logger.info(
        "store: %s, values of %s blocks, fingerprint %s",
        redact(config.store),
        "/".join(map(str, shape.num_blocks.values())),
        fingerprint,
    )
    return StoreTier(
        state,
        spm,
        shape,
        config,
        num_ranks=num_ranks,
        fingerprint=fingerprint,
        breaker=breaker,
    )
