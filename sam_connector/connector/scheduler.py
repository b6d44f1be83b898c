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
from sam_connector.core.tiers import SupportsSessionAwareKVManagement, live_tiers
from sam_connector.protocol.results import result_to_wire
from sam_connector.vllm_adapter import compat
from sam_connector.vllm_adapter.host import SamHost

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SchedulerSide:
    """Session management of one engine.

    Args:
        kv_cache_manager: the engine's.
        config: settings.

    Attributes:
        host: the session-aware manager; ``None`` while it is switched off.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, config: SamConfig) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._tiers: tuple[SupportsSessionAwareKVManagement, ...] | None = None
        self.host = self._start(kv_cache_manager, config)
        self._control = ControlService(self.host)

    # --- what vLLM calls --------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self.host is not None:
            self.guarded(self.host.on_request_added, request)

    def on_blocks_assigned(self, request: Request) -> None:
        if self.host is not None:
            self.guarded(self.host.on_blocks_assigned, request)

    def on_step(self) -> None:
        if self.host is not None:
            self.guarded(self.host.advance)
            if self._control.has_waiters:
                self.guarded(self._control.answer_waiters)

    def on_request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Returns the outcome of the hint's edits for the response, if it had any."""
        if self.host is None:
            return None
        results = self.guarded(self.host.on_request_finished, request, block_ids)
        if not results:
            return None
        return {"agent_hint": {"results": [result_to_wire(r) for r in results]}}

    @property
    def has_waiters(self) -> bool:
        """Whether a client waits for an operation, so that steps must go on."""
        return self._control.has_waiters

    def control(self, payload: str, *, is_paused: bool) -> str | Future[str]:
        """Answers a control call; see ``protocol.control``."""
        return self._control.handle(payload, is_paused=is_paused)

    def reset(self) -> None:
        if self.host is not None:
            self.guarded(self.host.reset)

    def shutdown(self) -> None:
        """Answers whoever still waits. Safe to call more than once."""
        self._control.close()

    # --- internals --------------------------------------------------------------------

    def _start(
        self, kv_cache_manager: KVCacheManager, config: SamConfig
    ) -> SamHost | None:
        if config.sam is SamMode.OFF:
            logger.info("session hints are switched off")
            return None
        if not kv_cache_manager.enable_caching:
            logger.warning("session hints need prefix caching, which is off")
            return None
        missing = compat.missing_internals(kv_cache_manager)
        if missing:
            logger.error(
                "session hints are off: this vLLM (%s) has changed %s",
                compat.vllm_version(),
                ", ".join(missing),
            )
            return None
        host = SamHost(kv_cache_manager, config, tiers=self._find_tiers)
        host.pool.guard_callbacks(self.guarded)
        logger.info(
            "session hints are %s for %d blocks", config.sam, host.pool.num_blocks
        )
        return host

    def _find_tiers(self) -> Sequence[SupportsSessionAwareKVManagement]:
        """The connectors of this engine that understand sessions.

        Looked up once the first is needed, since children of a ``MultiConnector``
        are bound one after the other.
        """
        if self._tiers is None:
            self._tiers = tuple(
                tier
                for tier in live_tiers()
                if getattr(tier, "_kv_cache_manager", None) is self._kv_cache_manager
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
