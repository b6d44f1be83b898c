"""Sessions, in terms of what the inner connector has saved."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from sam_connector.connector.spm.config import SpmConfig
from sam_connector.connector.spm.inner import InnerScheduler
from sam_connector.connector.spm.keep_alive import LookupKeepAlive
from sam_connector.connector.spm.metadata import JobKind, SpmJob, SpmResult
from sam_connector.connector.spm.operations import Kind, Operation, Target
from sam_connector.connector.spm.requests import RequestWatch, StepPlan
from sam_connector.connector.spm.saved_keys import SavedKeys
from sam_connector.connector.spm.sequences import SequenceBook, TokenSequence
from sam_connector.connector.spm.traits import Confirm, Refresh
from sam_connector.connector.spm.transfers import Begun, Transfers
from sam_connector.connector.tier.session_directory import (
    NoSessions,
    SessionDirectory,
)
from sam_connector.core.clock import Clock
from sam_connector.core.tiers import (
    ContextBlocks,
    OperationHandle,
    Residency,
    SupportsSessionAwareKVManagement,
    TierEvent,
    TierEventType,
)
from sam_connector.core.types import (
    BlockCounts,
    BlockHash,
    EditStatus,
    EditType,
    GroupId,
    SessionKey,
)
from sam_connector.vllm_adapter.chains import ChainReader
from sam_connector.vllm_adapter.gpu_cache import GpuCache

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_GROUP = GroupId(0)
_MAX_UNCONFIRMED = 1_024
#: Between two look-ups that are to confirm a save.
_CONFIRM_S = 0.05


class _Unconfirmed(NamedTuple):
    """What a request of a session has computed, and the inner connector may save."""

    session: SessionKey
    sequence: TokenSequence
    num_blocks: int
    deadline: float


class SpmTier(SupportsSessionAwareKVManagement):
    """The inner connector as a tier of sessions.

    Its connector sees to it that its events are heard.

    Args:
        kv_cache_manager: the engine's.
        inner: the inner connector.
        config: settings.
        gpu: the engine's cache.
        chains: reads requests' hashes.
        clock: where time comes from.
        block_bytes: size of a block, all ranks together.
        num_ranks: that report every job.
        no_transfers: why the inner connector can be given no requests of ours;
            ``None`` if its traits decide.
    """

    is_polled = False

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        inner: InnerScheduler,
        config: SpmConfig,
        gpu: GpuCache,
        chains: ChainReader,
        clock: Clock,
        *,
        block_bytes: int,
        num_ranks: int,
        no_transfers: str | None = None,
    ) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._inner = inner
        self._config = config
        self._gpu = gpu
        self._chains = chains
        self._clock = clock
        self._num_ranks = num_ranks
        self._no_transfers = no_transfers
        self.directory: SessionDirectory = NoSessions()
        self.book = SequenceBook(
            max_tokens=config.max_remembered_tokens, max_contexts=config.max_contexts
        )
        self.keys = SavedKeys(whole_sequences=config.traits.whole_sequences)
        self.watch = RequestWatch(config, chains, clock)
        self.keep_alive = LookupKeepAlive(
            inner, self.book, self.keys, clock, interval_s=config.keep_alive_s
        )
        self.transfers = Transfers(
            config,
            inner,
            gpu,
            self.keys,
            self.watch,
            clock,
            block_bytes=block_bytes,
            on_ended=self._on_operation_ended,
            on_loaded=self._on_loaded,
        )
        self._events: list[TierEvent] = []
        #: Jobs whose ranks have not all reported: their errors so far, by rank.
        self._reported: dict[int, dict[int, str | None]] = {}
        #: What steps under way save, by job.
        self._step_saves: dict[int, list[list[BlockHash]]] = {}
        #: Sessions that what these steps save may belong to.
        self._unclaimed: deque[tuple[SessionKey, TokenSequence]] = deque(
            maxlen=_MAX_UNCONFIRMED
        )
        self._unconfirmed: deque[_Unconfirmed] = deque()
        self._confirm_at = 0.0
        #: The request that is just ending, and its blocks, once somebody asks.
        self._finishing: Request | None = None
        self._seen: TokenSequence | None = None

    # --- requests -------------------------------------------------------------------

    def on_finishing(self, request: Request) -> None:
        """The session manager is about to hear that the request has ended."""
        self._finishing, self._seen = request, None

    def on_finished(self, request: Request) -> None:
        self._finishing = self._seen = None
        self.watch.remove(request)

    # --- steps ----------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether steps must go on, for a transfer or to be heard."""
        return self.transfers.has_pending or self.has_events

    @property
    def has_events(self) -> bool:
        """Whether ``take_session_events`` has something to say."""
        return bool(self._events)

    def begin_step(self, scheduled: SchedulerOutput) -> tuple[StepPlan, Begun]:
        """What the step does for the engine's requests, and what of ours begins."""
        plan = self.watch.plan_step(scheduled)
        is_busy = bool(plan.sync_blocks or plan.async_requests)
        begun = self.transfers.begin(is_busy=is_busy)
        if plan.saves:
            job = SpmJob(self._inner.new_id(), JobKind.STEP_SAVES)
            self._step_saves[job.job_id] = plan.saves
            begun.jobs.append(job)
        if self._unconfirmed and self._clock.now() >= self._confirm_at:
            self._confirm_one()
        return plan, begun

    def on_results(self, results: frozenset[SpmResult]) -> None:
        """Ranks are done with jobs; one that all are done with has ended."""
        for rank, job_id, error in sorted(results, key=lambda r: (r.job_id, r.rank)):
            reported = self._reported.setdefault(job_id, {})
            reported[rank] = reported.get(rank) or error
            if len(reported) < self._num_ranks:
                continue
            del self._reported[job_id]
            worst = next((e for e in reported.values() if e is not None), None)
            saves = self._step_saves.pop(job_id, None)
            if saves is None:
                self.transfers.on_job_ended(job_id, worst)
            elif worst is None:
                self._note_saves(saves)

    def on_failures(self, block_ids: set[int], request_ids: set[str]) -> None:
        """Loads of the engine's requests have failed."""
        self.keys.drop(self.watch.on_failures(block_ids, request_ids))

    def reset(self) -> None:
        """All content is void, what the inner connector has saved included."""
        self.transfers.reset()
        self._step_saves = {job_id: [] for job_id in self._step_saves}
        self._unconfirmed.clear()
        self._unclaimed.clear()
        self.keys.clear()
        self.keep_alive.clear()
        self.watch.clear()
        self.book.clear()

    def abandon(self, reason: str) -> None:
        """Nothing more is begun."""
        self._no_transfers = reason
        self.transfers.reset()
        self._unconfirmed.clear()
        self.keep_alive.stop()

    def close(self) -> None:
        self.keep_alive.close()

    def stats(self) -> dict[str, int]:
        """Gauges and counters, for tests and operators."""
        tracker = self.keys.tracker
        return {
            "sessions_remembered": len(self.book),
            "tokens_remembered": self.book.num_tokens,
            "keys_tracked": sum(map(tracker.num_chunks_of, self.book.sessions())),
            "keys_shared": tracker.num_shared,
            "keys_orphaned": tracker.num_orphaned,
            "keys_refreshed": self.keep_alive.num_refreshed,
            "inner_lookups": self._inner.num_lookups,
            "failed_loads": self.watch.num_failed_loads,
            "operations_open": len(self.transfers),
            "gpu_pinned_blocks": self._gpu.num_pins,
        }

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if accounts disagree. For tests."""
        self.book.check_integrity()
        self.keys.tracker.check_integrity()

    # --- the capability ---------------------------------------------------------------

    @property
    @override
    def session_capabilities(self) -> frozenset[EditType]:
        can = {EditType.EVICT}
        traits = self._config.traits
        if self._no_transfers is None:
            if traits.synthetic_load:
                can.add(EditType.PREFETCH)
            # Without being asked to, it can still be watched until it has saved.
            if traits.synthetic_save or traits.confirm is Confirm.LOOKUP:
                can.add(EditType.OFFLOAD)
        return frozenset(can)

    @override
    def register_cache(
        self,
        session: SessionKey,
        request_id: str,
        contents: Callable[[], ContextBlocks],
    ) -> None:
        seen = self._sequence_of_finishing()
        hashes = contents().block_hashes.get(_GROUP, ())
        if seen is None or not hashes or not seen.covers(len(hashes), hashes[-1]):
            return
        for forgotten in self.book.note(session, seen, len(hashes)):
            self._forget_keys(forgotten)
        for sequence in self.book.of(session)[-1:]:
            self.keys.claim(session, sequence)
            if self._step_saves:
                self._unclaimed.append((session, sequence))
            if (
                self._config.traits.confirm is Confirm.LOOKUP
                and self._no_transfers is None
                and len(self._unconfirmed) < _MAX_UNCONFIRMED
            ):
                deadline = self._clock.now() + self._config.confirm_timeout_s
                self._unconfirmed.append(
                    _Unconfirmed(session, sequence, len(hashes), deadline)
                )

    @override
    def offload(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        targets = [self._target(session, context) for context in contexts]
        return self._start(Kind.OFFLOAD, operation_id, session, targets)

    @override
    def prefetch(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        targets = [self._target(session, context) for context in contexts]
        return self._start(Kind.PREFETCH, operation_id, session, targets)

    @override
    def evict(
        self,
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
        *,
        purge: bool,
    ) -> OperationHandle:
        self.transfers.cancel(session, "the session was evicted")
        if all(context.is_whole for context in contexts):
            self._forget(session)
        return OperationHandle(status=EditStatus.COMPLETED)

    @override
    def edit_unknown(
        self, edit_type: EditType, operation_id: str, session: SessionKey
    ) -> OperationHandle:
        """After a reset of the engine's cache only we remember its sessions."""
        known = self.book.of(session)
        if not known or edit_type not in self.session_capabilities:
            return OperationHandle(status=EditStatus.NOT_FOUND)
        targets = [Target(sequence, len(sequence), None) for sequence in known]
        if edit_type is EditType.EVICT:
            count = sum(target.num_blocks for target in targets)
            self.evict(operation_id, session, (), purge=False)
            blocks = BlockCounts(requested=count, missing=count)
            return OperationHandle(status=EditStatus.COMPLETED, blocks=blocks)
        return self._start(Kind.PREFETCH, operation_id, session, targets)

    @override
    def forget(self, session: SessionKey) -> None:
        self.transfers.cancel(session, "the session was freed")
        self._forget(session)

    @override
    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        if self._config.traits.refresh is Refresh.LOOKUP:
            with self._inner.lock:
                self.keep_alive.set_lease(session, context_id, deadline)

    @override
    def release(self, session: SessionKey, context_id: int) -> None:
        # Its tokens are remembered: the engine's cache may only have been emptied.
        self.set_lease(session, context_id, 0.0)

    @override
    def query_residency(
        self, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> Residency:
        known = self.book.of(session)
        count = sum(self.keys.num_saved(s, len(s)) for s in known)
        return Residency(tier=self._config.inner_name, num_blocks=count)

    @override
    def take_session_events(self) -> Sequence[TierEvent]:
        events, self._events = self._events, []
        return events

    # --- internals --------------------------------------------------------------------

    def _start(
        self,
        kind: Kind,
        operation_id: str,
        session: SessionKey,
        targets: list[Target],
    ) -> OperationHandle:
        if not any(target.num_blocks for target in targets):
            return OperationHandle(status=EditStatus.COMPLETED)
        refusal = self.transfers.add(kind, operation_id, session, targets)
        if refusal is not None:
            return OperationHandle(status=EditStatus.REJECTED, reason=refusal)
        return OperationHandle(status=EditStatus.ACCEPTED)

    def _target(self, session: SessionKey, context: ContextBlocks) -> Target:
        hashes = context.block_hashes.get(_GROUP, ())
        if not hashes:
            return Target(None, 0, context.context_id)
        # A range is of no use without what comes before it.
        num_blocks = context.block_start + len(hashes)
        sequence = self.book.find(session, num_blocks, hashes[-1])
        if sequence is None:
            seen = self._sequence_of_finishing()
            if seen is not None and seen.covers(num_blocks, hashes[-1]):
                sequence = seen
        return Target(sequence, num_blocks, context.context_id)

    def _sequence_of_finishing(self) -> TokenSequence | None:
        request = self._finishing
        if request is None or not self._can_remember(request):
            return None
        if self._seen is None:
            self._seen = TokenSequence(
                self._chains.primary_block_size,
                lora_request=request.lora_request,
                cache_salt=request.cache_salt,
            )
            tokens = list(request.all_token_ids)
            self._seen.extend(self._chains.hashes(request, _GROUP), tokens)
        return self._seen

    def _can_remember(self, request: Request) -> bool:
        """Whether its tokens are all there is to know of its content."""
        return self.watch.is_visible(request) and not request.mm_features

    def _on_loaded(self, session: SessionKey, target: Target) -> None:
        """The manager learns what of a session is back."""
        find: Callable[..., Any] = self._gpu.find_id
        if target.context_id is not None:
            self.directory.restore(session, target.context_id, find)
            return
        assert target.sequence is not None
        hashes = target.sequence.hashes[: target.num_blocks]
        present = [h for h in hashes if find(_GROUP, h)]
        self.directory.adopt(
            session, None, [{_GROUP: present}], find, self._clock.now()
        )

    def _on_operation_ended(self, operation: Operation) -> None:
        handle = operation.outcome()
        is_load = operation.kind is Kind.PREFETCH
        if operation.num_done:
            self._events.append(
                TierEvent(
                    type=TierEventType.LOAD if is_load else TierEventType.SAVE,
                    num_blocks=operation.num_done,
                    num_bytes=handle.num_bytes,
                )
            )
        self._events.append(
            TierEvent(
                type=TierEventType.OPERATION,
                operation_id=operation.operation_id,
                handle=handle,
            )
        )

    def _note_saves(self, saves: list[list[BlockHash]]) -> None:
        for hashes in saves:
            self.keys.add_saved(hashes)
        # A request may end before the step that saved its prompt is reported.
        for session, sequence in self._unclaimed:
            if session in self.book:
                self.keys.claim(session, sequence)
        if not self._step_saves:
            self._unclaimed.clear()

    def _confirm_one(self) -> None:
        """Whether the inner connector has saved what it was to save."""
        self._confirm_at = self._clock.now() + _CONFIRM_S
        waiting = self._unconfirmed.popleft()
        session, sequence, num_blocks, deadline = waiting
        if session not in self.book:
            return
        num_found = self._inner.num_found(sequence, num_blocks) or 0
        if num_found:
            self.keys.add_saved(sequence.hashes[:num_found])
            self.keys.claim(session, sequence)
        if num_found < num_blocks and self._clock.now() < deadline:
            self._unconfirmed.append(waiting)

    def _forget(self, session: SessionKey) -> None:
        with self._inner.lock:
            self.book.remove(session)
            self._forget_keys(session)

    def _forget_keys(self, session: SessionKey) -> None:
        self.keys.tracker.remove(session)
        self.keep_alive.forget(session)
