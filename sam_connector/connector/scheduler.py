"""The scheduler role: everything that decides.

Nothing here may raise into vLLM's scheduler. What goes wrong in our own code
switches session management off for the rest of the engine's life: the blocks
become ordinary, and the engine goes on as if the connector did nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from sam_connector.config import SamConfig, SamMode
from sam_connector.connector.control import ControlService
from sam_connector.connector.metadata import (
    EMPTY_METADATA,
    SAMConnectorMetadata,
    WorkerReport,
)
from sam_connector.connector.metrics import StoreMeter, StoreStats
from sam_connector.connector.tier.build import build_host_tier
from sam_connector.connector.tier.host_tier import HostTier
from sam_connector.connector.tier.store_tier import StoreTier
from sam_connector.connector.waker import EngineWaker
from sam_connector.core.clock import Clock, MonotonicClock
from sam_connector.core.tiers import SupportsSessionAwareKVManagement, live_tiers
from sam_connector.protocol.results import result_to_wire
from sam_connector.vllm_adapter import compat
from sam_connector.vllm_adapter.host import SamHost

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SchedulerSide:
    """Session management and host tier of one engine.

    Args:
        kv_cache_manager: the engine's.
        config: settings.
        vllm_config: the engine's.
        kv_cache_config: geometry of its cache.
        clock: where time comes from.

    Attributes:
        host: the session-aware manager; ``None`` while it is switched off.
        tier: the host tier; ``None`` while there is none.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        config: SamConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._kv_cache_manager = kv_cache_manager
        self._config = config
        self._engine_configs = vllm_config, kv_cache_config
        #: Wakes an idle engine for what the store has to say.
        self.waker = EngineWaker()
        self._meter = StoreMeter()
        self._tiers: tuple[SupportsSessionAwareKVManagement, ...] | None = None
        self.host: SamHost | None = None
        self.tier: HostTier | None = None
        if self._can_run():
            self.tier = self._build_tier()
            self.host = self._start(kv_cache_manager, config)
        self._connect()
        self._control = ControlService(self.host, self.tier)

    # --- what vLLM calls --------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self.host is not None:
            self.guarded(self.host.on_request_added, request)

    def num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> int | None:
        """Tokens that the host tier has beyond the local hit; changes nothing."""
        if self.tier is None:
            return 0
        matched = self.guarded(
            self.tier.num_new_matched_tokens, request, num_computed_tokens
        )
        return 0 if self.tier.is_abandoned else matched

    def on_blocks_assigned(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.tier is not None and num_external_tokens:
            if not self.tier.is_abandoned:
                self.guarded(
                    self.tier.start_load,
                    request,
                    blocks.get_block_ids(),
                    num_external_tokens,
                )
            if self.tier.is_abandoned:
                # The request waits for it all the same.
                self.tier.fail_load(request.request_id)
        if self.host is not None:
            self.guarded(self.host.on_blocks_assigned, request)

    def on_step(self) -> SAMConnectorMetadata:
        """Does what is due; returns what the ranks are to copy."""
        metadata = None
        self.waker.is_due = False
        if self.tier is not None and self.tier.is_due:
            metadata = self.guarded(self._tier_step)
        if self._store is not None:
            self.waker.set_busy(self._waits_for_store)
        if self.host is not None:
            if self.tier is not None and self.tier.has_events:
                self.guarded(self.host.hear_tiers)
            if self.host.is_due:
                self.guarded(self.host.advance)
            if self._control.has_waiters:
                self.guarded(self._control.answer_waiters)
        return metadata or EMPTY_METADATA

    def on_report(self, report: WorkerReport) -> None:
        """Ranks are done with copies."""
        if self.tier is not None:
            if report.results:
                self.guarded(self.tier.on_report, report.results)
            if report.store_results:
                self.guarded(self.tier.on_store_report, report.store_results)

    def on_request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Returns the outcome of the hint's edits for the response, if it had any."""
        results = None
        if self.host is not None:
            results = self.guarded(self.host.on_request_finished, request, block_ids)
        if self.tier is not None:
            self.guarded(self.tier.on_request_finished, request, block_ids)
        if not results:
            return None
        return {"agent_hint": {"results": [result_to_wire(r) for r in results]}}

    @property
    def has_pending_work(self) -> bool:
        """Whether a copy is under way or a client waits, so that steps must go on."""
        if self._control.has_waiters and not self._waits_for_store:
            return True
        if self.waker.is_due:
            return True
        return self.tier is not None and (self.tier.has_pending_work or self._must_poll)

    @property
    def has_pinned_blocks(self) -> bool:
        """Whether blocks will be given back once copies have ended."""
        return self.tier is not None and self.tier.has_pinned_blocks

    def set_num_slots(self, num_slots: int) -> None:
        """Every rank has room for so many slots; heard before the first step."""
        if self.tier is not None:
            self.tier.close()
            self.tier = self._build_tier(num_slots)
            self._tiers = None
            self._connect()
            self._control = ControlService(self.host, self.tier)

    @property
    def _store(self) -> StoreTier | None:
        return None if self.tier is None else self.tier.state.remote

    @property
    def _waits_for_store(self) -> bool:
        """The store owes an answer, for which the engine is woken."""
        return self.tier is not None and self.tier.waits_for_store

    @property
    def _must_poll(self) -> bool:
        """Steps are the only way to hear of the store, as long as no control call has
        let us know the engine that could be woken."""
        return self._waits_for_store and not self.waker.is_attached

    def _tier_step(self) -> SAMConnectorMetadata:
        assert self.tier is not None
        # Without a store a pause waits for all that is under way.
        is_paused = self._store is not None and self.waker.is_paused
        return self.tier.on_step(is_paused=is_paused)

    def take_stats(self) -> StoreStats | None:
        """What has become of the store since the last call, if there is one."""
        store = self._store
        if store is None or not self._meter.is_due(store.now(), is_up=store.is_up):
            return None
        return self._meter.measure(store.stats())

    def control(self, payload: str, *, is_paused: bool) -> str | Future[str]:
        """Answers a control call; see ``protocol.control``."""
        return self._control.handle(payload, is_paused=is_paused)

    def reset(self) -> None:
        """All cached content is void, in the engine and in the tier."""
        if self.tier is not None:
            self.guarded(self.tier.reset)
        if self.host is not None:
            self.guarded(self.host.reset)

    def shutdown(self) -> None:
        """Answers whoever still waits. Safe to call more than once."""
        self._control.close()
        self.waker.close()
        if self.tier is not None:
            self.tier.close()

    # --- internals --------------------------------------------------------------------

    def _can_run(self) -> bool:
        if not self._kv_cache_manager.enable_caching:
            logger.warning("session hints need prefix caching, which is off")
            return False
        missing = compat.missing_internals(self._kv_cache_manager)
        if missing:
            logger.error(
                "session hints are off: this vLLM (%s) has changed %s",
                compat.vllm_version(),
                ", ".join(missing),
            )
        return not missing

    def _build_tier(self, num_slots: int | None = None) -> HostTier | None:
        vllm_config, kv_cache_config = self._engine_configs
        return build_host_tier(
            vllm_config,
            kv_cache_config,
            self._kv_cache_manager,
            self._config.host,
            store_config=self._config.store,
            max_protected_fraction=self._config.limits.max_protected_fraction,
            num_slots=num_slots,
            wake=self.waker.wake,
            clock=self._clock,
        )

    def _connect(self) -> None:
        """The tier keeps slots for the sessions that the manager knows."""
        if self.tier is not None and self.host is not None:
            self.tier.state.directory = self.host.manager.directory
            self.tier.has_listener = True

    def _start(
        self, kv_cache_manager: KVCacheManager, config: SamConfig
    ) -> SamHost | None:
        if config.sam is SamMode.OFF:
            logger.info("session hints are switched off")
            return None
        host = SamHost(kv_cache_manager, config, self._clock, self._find_tiers)
        host.pool.guard_callbacks(self.guarded)
        logger.info(
            "session hints are %s for a KV cache of %d blocks of %d tokens",
            config.sam,
            host.pool.num_blocks,
            host.chains.primary_block_size,
        )
        return host

    def _find_tiers(self) -> Sequence[SupportsSessionAwareKVManagement]:
        """The connectors of this engine that understand sessions.

        Looked up once the first is needed, since children of a ``MultiConnector``
        are bound one after the other.
        """
        if self._tiers is None:
            own = () if self.tier is None else (self.tier,)
            self._tiers = (
                *own,
                *(
                    tier
                    for tier in live_tiers()
                    if getattr(tier, "_kv_cache_manager", None)
                    is self._kv_cache_manager
                ),
            )
        return self._tiers

    def guarded(self, call: Callable[..., T], *args: Any) -> T | None:
        try:
            return call(*args)
        except Exception:
            logger.exception("session hints are off after an internal error")
            self._switch_off()
            return None

    def _switch_off(self) -> None:
        if self.host is not None:
            self.host.abandon()
            self.host = None
            self._control.switch_off()
        if self.tier is not None:
            self.tier.abandon()
