"""The session-aware manager inside a vLLM engine.

Hosted by ``SAMConnector`` in the engine core process, and by the benchmarks, which
drive it with the real ``KVCacheManager`` in virtual time. Every method runs on the
scheduler's thread and none of them raises for what a client sent.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sam_connector.config import SamConfig, SamMode
from sam_connector.core.clock import Clock, MonotonicClock
from sam_connector.core.manager import SessionAwareManager
from sam_connector.core.tiers import SupportsSessionAwareKVManagement
from sam_connector.core.ttl import TICK_S
from sam_connector.core.types import Edit, EditResult, EditStatus, SessionKey
from sam_connector.errors import HintError
from sam_connector.protocol.lowering import hint_from_request
from sam_connector.vllm_adapter.block_pool import BlockPoolAdapter
from sam_connector.vllm_adapter.chains import ChainReader

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SamHost:
    """Feeds a ``SessionAwareManager`` from vLLM's request boundaries.

    Args:
        kv_cache_manager: the engine's; its block pool gets the zoned queue.
        config: settings; ``sam`` must not be ``off``.
        clock: where time comes from.
        tiers: connectors to drive.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        config: SamConfig,
        clock: Clock | None = None,
        tiers: Callable[[], Sequence[SupportsSessionAwareKVManagement]] = tuple,
    ) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._clock = clock or MonotonicClock()
        self.pool = BlockPoolAdapter(
            kv_cache_manager.block_pool, enforce=config.sam is SamMode.ON
        )
        self.chains = ChainReader(kv_cache_manager)
        self.manager = SessionAwareManager(
            self.pool,
            num_blocks=kv_cache_manager.block_pool.num_gpu_blocks,
            limits=config.limits,
            now=self._clock.now(),
            tiers=tiers,
            ranges_enabled=config.ranges,
            id_prefix=f"op-{secrets.token_hex(4)}",
        )
        self.pool.free_queue.on_shortage = self.on_shortage
        self._next_advance = self._clock.now()
        #: Hints that reached the engine in a form it could not read.
        self.num_invalid_hints = 0

    # --- requests -------------------------------------------------------------------

    def on_request_added(self, request: Request) -> None:
        """A request enters the scheduler; does nothing unless it names a session."""
        sampling_params = request.sampling_params
        extra_args = None if sampling_params is None else sampling_params.extra_args
        kv_hints = getattr(request, "kv_hints", None)
        if not (
            request.session_id or request.kv_transfer_params or extra_args or kv_hints
        ):
            return
        try:
            hint = hint_from_request(
                kv_transfer_params=request.kv_transfer_params,
                session_id=request.session_id,
                extra_args=extra_args,
                kv_hints=kv_hints,
            )
        except HintError as error:
            self.num_invalid_hints += 1
            logger.debug("hint of request %s ignored: %s", request.request_id, error)
            return
        if hint is not None:
            self.manager.on_request_added(request.request_id, hint)

    def on_blocks_assigned(self, request: Request) -> None:
        """Blocks were assigned at admission or after a preemption."""
        if not self.manager.tracks(request.request_id):
            return
        self._notice_reset()
        block_ids = self._kv_cache_manager.get_block_ids(request.request_id)
        self.manager.on_blocks_assigned(
            request.request_id,
            self.chains.assigned(request, block_ids),
            self._clock.now(),
        )

    def on_request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]] | None = None
    ) -> list[EditResult] | None:
        """A request is done; its blocks are still assigned.

        Returns:
            One result per edit of its hint; ``None`` if it named no session.
        """
        if not self.manager.tracks(request.request_id):
            return None
        self._notice_reset()
        if block_ids is None:
            block_ids = self._kv_cache_manager.get_block_ids(request.request_id)
        return self.manager.on_request_finished(
            request.request_id,
            self.chains.computed(request, block_ids),
            self._clock.now(),
            aborted=_was_cut_short(request),
        )

    @property
    def is_due(self) -> bool:
        """Whether to ``advance`` in this step: once in a tick of the wheel."""
        return self._clock.now() >= self._next_advance

    def advance(self) -> None:
        """Does what time has made due."""
        now = self._clock.now()
        again = False
        if not self.manager.is_idle:
            self._notice_reset()
            again = self.manager.advance(now)
        self._next_advance = now if again else now + TICK_S

    def hear_tiers(self) -> None:
        """A tier in this process has something to say."""
        self.manager.advance(self._clock.now())

    def on_shortage(self, num_missing: int) -> None:
        """An allocation is about to break into claimed blocks."""
        self.manager.relieve(num_missing, self._clock.now())

    # --- control --------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def apply_edits(self, key: SessionKey, edits: Sequence[Edit]) -> list[EditResult]:
        self._notice_reset()
        return self.manager.apply_edits(key, edits, self._clock.now())

    def set_lease(
        self, key: SessionKey, ttl_s: float, *, expected_resume_s: float | None = None
    ) -> EditStatus | None:
        self._notice_reset()
        return self.manager.set_lease(
            key, ttl_s, self._clock.now(), expected_resume_s=expected_resume_s
        )

    def free_session(self, key: SessionKey, *, tree: bool) -> int:
        self._notice_reset()
        return self.manager.free_session(key, tree=tree)

    def settle(self) -> None:
        """Catches up with time and resets before the state is read."""
        self._notice_reset()
        self.manager.settle(self._clock.now())

    def reset(self) -> None:
        """Forgets every session's blocks, because their content is void."""
        self.pool.take_reset()
        self.manager.on_cache_reset()

    def abandon(self) -> None:
        """Leaves the pool in stock order for good; the manager is not used again."""
        self.pool.abandon()

    # --- internals ------------------------------------------------------------------

    def _notice_reset(self) -> None:
        if self.pool.take_reset():
            self.manager.on_cache_reset()


@functools.cache
def _cut_short_statuses() -> frozenset[Any]:
    from vllm.v1.request import RequestStatus

    names = ("FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED")
    return frozenset(
        getattr(RequestStatus, name) for name in names if hasattr(RequestStatus, name)
    )


def _was_cut_short(request: Request) -> bool:
    return request.status in _cut_short_statuses()
