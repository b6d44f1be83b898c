"""The host tier: blocks in pinned host memory, by content.

Three parts decide what is copied (``operations``, ``saves``, ``loads``); this one
decides when they may. It takes the ends of copies, keeps slots, the engine's blocks
and sessions in line with them, and is what the session-aware manager drives.

Scheduler thread only. Blocks of the engine are taken and named only while a step's
metadata is built or its output taken. A request that ends has its own blocks pinned,
and an evict gives pins back. Nothing happens while vLLM looks a request up.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sam_connector.connector.metadata import (
    RankResult,
    SAMConnectorMetadata,
    StoreJob,
    StoreResult,
)
from sam_connector.connector.tier.jobs import Job
from sam_connector.connector.tier.loads import RequestLoads
from sam_connector.connector.tier.offload import Offload
from sam_connector.connector.tier.open_operations import OpenOperations
from sam_connector.connector.tier.operations import Operation
from sam_connector.connector.tier.prefetch import Prefetch
from sam_connector.connector.tier.recall import Recall, RemoteEvict
from sam_connector.connector.tier.saves import Saver
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Content
from sam_connector.core.tiers import (
    ContextBlocks,
    OperationHandle,
    Residency,
    SupportsSessionAwareKVManagement,
    TierEvent,
    TierEventType,
)
from sam_connector.core.types import EditStatus, EditType, SessionKey
from sam_connector.errors import IntegrityError
from sam_connector.transfer.contract import Direction
from sam_connector.vllm_adapter.chains import ChainReader

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Blocks that operations look at in one step, all together.
_MAX_LOOKS = 2_048


class HostTier(SupportsSessionAwareKVManagement):
    """The tier as the engine and the session-aware manager see it.

    Args:
        state: slots, jobs and the engine's cache.
        chains: reads requests' hashes.
        demotion_window: see ``Saver``.
    """

    is_polled = False

    def __init__(
        self, state: TierState, chains: ChainReader, *, demotion_window: int
    ) -> None:
        self.state = state
        self._chains = chains
        self._saver = Saver(state, demotion_window=demotion_window)
        self._loads = RequestLoads(state, chains)
        self._operations = OpenOperations(state, self._report)
        #: The session-aware manager hears what happens here.
        self.has_listener = False
        self._events: list[TierEvent] = []
        #: Contents to forget, once their session has let go of them.
        self._purges: deque[Content] = deque()
        #: Copies that every rank is done with, not dealt with yet.
        self._ended: deque[Job] = deque()
        #: Contexts of requests that are about to be reported as finished.
        self._contexts_of: dict[str, tuple[SessionKey, int]] = {}
        #: Nothing is decided any more; copies under way are waited for.
        self.is_abandoned = False

    # --- what the engine's scheduler calls ----------------------------------------

    def num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> int | None:
        if self.is_abandoned:
            return 0
        return self._loads.num_new_matched_tokens(request, num_computed_tokens)

    def start_load(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        self._loads.start(request, block_ids, num_tokens)

    def fail_load(self, request_id: str) -> None:
        """A request waits for a load that was not planned: let it compute."""
        self._loads.fail(request_id)

    def on_request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """A request is done and still has its blocks."""
        self._loads.on_request_finished(request.request_id)
        if self.is_abandoned:
            return
        context = self._contexts_of.pop(request.request_id, None)
        if not self._saver.wants_finished(is_session=context is not None):
            return
        gpu = self.state.gpu
        blocks = {
            (group_id, block_hash): gpu.block(block_id)
            for group_id, chain in self._chains.computed(request, block_ids).items()
            for block_hash, block_id in zip(chain.hashes, chain.block_ids, strict=False)
        }
        self._saver.save_finished(blocks, context)

    @property
    def is_due(self) -> bool:
        """Whether ``on_step`` has anything to do; cheap, asked in every step."""
        return bool(
            len(self._operations)
            or self.state.jobs.has_new
            or self._saver.is_due
            or self._loads.num_arriving
            or self._purges
            or (self.state.remote is not None and self.state.remote.is_due)
        )

    def on_step(self, *, is_paused: bool = False) -> SAMConnectorMetadata:
        """Plans copies; returns what the ranks are to start in this step.

        Args:
            is_paused: the engine sleeps or is paused: no block of its may change.
        """
        remote = self.state.remote
        store_jobs: tuple[StoreJob, ...] = ()
        if not self.is_abandoned:
            if is_paused:
                self._operations.cancel_all("the engine is paused")
            # Before the operations: they go on with what has arrived.
            if remote is not None:
                remote.hear()
            self._loads.on_step()
            self._purge()
            if len(self._operations):
                self._operations.advance(_MAX_LOOKS)
            self._saver.on_step()
        if remote is not None:
            store_jobs = remote.on_step()
        return self.state.jobs.take_metadata(store_jobs)

    def on_store_report(self, results: Iterable[StoreResult]) -> None:
        """Ranks are done with reads and writes."""
        if self.state.remote is not None:
            self.state.remote.on_report(results)
        self._operations.settle()

    def on_report(self, results: Iterable[RankResult]) -> None:
        """Ranks are done with copies."""
        self._ended.extend(self.state.jobs.report(results))
        while self._ended:
            job = self._ended.popleft()
            try:
                if not self.is_abandoned:
                    self._on_ended(job)
            finally:
                self._release(job)
        self._operations.settle()

    @property
    def has_events(self) -> bool:
        """Whether the session-aware manager has something to hear."""
        return bool(self._events)

    @property
    def has_pending_work(self) -> bool:
        """A copy is under way, due, or somebody is owed an answer: steps must go on.

        Nothing here waits for anything but copies, which end by themselves, and
        requests' reads, which have a deadline.
        """
        if self.is_abandoned:
            return len(self.state.jobs) > 0
        remote = self.state.remote
        return bool(
            len(self.state.jobs)
            or self._loads.num_arriving
            or self._purges
            or self._operations.has_work
            or (remote is not None and remote.is_due)
            or self._events
            or self._saver.num_queued
        )

    @property
    def waits_for_store(self) -> bool:
        """The store owes an answer that only a step can take."""
        remote = self.state.remote
        return remote is not None and (
            remote.is_busy or self._operations.waits_for_store
        )

    def close(self) -> None:
        """Ends the threads that speak to the store."""
        if self.state.remote is not None:
            self.state.remote.close()

    @property
    def has_pinned_blocks(self) -> bool:
        """Blocks of the engine will be given back once copies have ended."""
        return self.state.gpu.num_pins > 0

    def abandon(self) -> None:
        """Something here is broken: nothing is decided from now on.

        Ranks still copy what they were told to, so what they read and write is
        given back only once they are done.
        """
        if self.is_abandoned:
            return
        self.is_abandoned = True
        self._events.clear()
        self._operations.abandon()
        self._loads.abandon()
        if self.state.remote is not None:
            self.state.remote.abandon("the host tier is off")
        while self._ended:
            self._release(self._ended.popleft())

    def reset(self, *, keep_store: bool = False) -> None:
        """All content is void. Copies under way end, and come to nothing.

        Args:
            keep_store: what the store has is not.
        """
        state = self.state
        state.generation += 1
        state.contexts.clear()
        state.slots.clear()
        self._saver.clear()
        if state.remote is not None:
            state.remote.reset(keep_names=keep_store)

    # --- what the session-aware manager calls -----------------------------------------

    @property
    @override
    def session_capabilities(self) -> frozenset[EditType]:
        return frozenset(EditType)

    @override
    def register_cache(
        self,
        session: SessionKey,
        request_id: str,
        contents: Callable[[], ContextBlocks],
    ) -> None:
        if self._saver.wants_finished(is_session=True):
            self._contexts_of[request_id] = session, contents().context_id
        remote = self.state.remote
        if remote is not None and remote.writes_sessions:
            self._operations.start(Offload(self.state, session, [contents()]))

    @override
    def offload(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        return self._operations.open(Offload, operation_id, session, contexts)

    @override
    def prefetch(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        return self._operations.open(Prefetch, operation_id, session, contexts)

    @override
    def evict(
        self,
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
        *,
        purge: bool,
    ) -> OperationHandle:
        is_whole = all(context.is_whole for context in contexts)
        # An offload would hold the range again once it ends; a prefetch would not.
        self._operations.cancel(session, offloads_only=not is_whole)
        if self.state.remote is not None:
            self.state.remote.evict(session, contexts if is_whole else (), purge=purge)
        for context in contexts:
            if context.is_whole:
                self.state.contexts.release(session, context.context_id, front=True)
            else:
                start = context.block_start
                length = max(map(len, context.block_hashes.values()), default=0)
                self.state.contexts.release_range(
                    session, context.context_id, start, start + length
                )
            if purge:
                self._purges.extend(
                    (group_id, block_hash)
                    for group_id, hashes in context.block_hashes.items()
                    for block_hash in hashes
                )
        return OperationHandle(status=EditStatus.COMPLETED)

    @override
    def edit_unknown(
        self, edit_type: EditType, operation_id: str, session: SessionKey
    ) -> OperationHandle:
        if self.state.remote is None:
            return OperationHandle(status=EditStatus.NOT_FOUND)
        kind = Recall if edit_type is EditType.PREFETCH else RemoteEvict
        if kind is RemoteEvict:
            self._operations.cancel(session, offloads_only=False)
        return self._operations.open(kind, operation_id, session, ())

    @override
    def forget(self, session: SessionKey) -> None:
        if self.state.remote is not None:
            self.state.remote.sessions.end(session)

    @override
    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        self.state.contexts.set_lease(session, context_id, deadline)
        if self.state.remote is not None:
            self.state.remote.sessions.set_lease(session, context_id, deadline)

    @override
    def set_resume(
        self, session: SessionKey, context_id: int, resume_at: float
    ) -> None:
        self.state.contexts.set_resume(session, context_id, resume_at)

    @override
    def release(self, session: SessionKey, context_id: int) -> None:
        self.state.contexts.release(session, context_id)
        if self.state.remote is not None:
            # Its values live out their time.
            self.state.remote.sessions.set_lease(session, context_id, 0.0)

    @override
    def query_residency(
        self, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> Residency:
        return Residency(tier="host", num_blocks=self.state.contexts.num_held(session))

    def num_in_store(self, session: SessionKey) -> int:
        """Blocks of a session that the store is known to have."""
        remote = self.state.remote
        return 0 if remote is None else remote.sessions.num_blocks_of(session)

    @override
    def take_session_events(self) -> Sequence[TierEvent]:
        events, self._events = self._events, []
        return events

    # --- state ----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        state = self.state
        remote = {} if state.remote is None else state.remote.stats()
        return {
            "host_slots": state.slots.num_slots,
            "host_used_slots": state.slots.num_used,
            "host_held_slots": state.contexts.num_claimed,
            "host_pinned_slots": state.slots.num_pinned,
            "host_displaced": state.slots.num_displaced,
            "gpu_pinned_blocks": state.gpu.num_pins,
            "jobs_in_flight": len(state.jobs),
            "operations_open": len(self._operations),
            "queued_saves": self._saver.num_queued,
            "late_reports": state.jobs.num_late,
            **{
                name: state.counts[name]
                for name in (
                    "external_hit_requests",
                    "external_hit_tokens",
                    "failed_loads",
                    "failed_copies",
                    "saves_dropped",
                )
            },
            **remote,
        }

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if any two accounts disagree. For tests."""
        state = self.state
        state.slots.check_integrity()
        state.contexts.check_integrity()
        pinned = [job.slots for job in state.jobs.open_jobs().values()]
        pinned += [operation.pinned_slots for operation in self._operations]
        pinned.append(self._loads.pinned)
        if state.remote is not None:
            pinned.append(state.remote.pins())
        pins = Counter(slot.block_id for slots in pinned for slot in slots)
        for slot in state.slots.blocks[1:]:
            if slot.num_pins != pins[slot.block_id]:
                raise IntegrityError(f"slot {slot.index}: {slot.num_pins} pins")
        if not len(state.jobs) and not self._operations and state.gpu.num_pins:
            raise IntegrityError(f"{state.gpu.num_pins} blocks pinned by nobody")

    # --- internals --------------------------------------------------------------------

    def _purge(self) -> None:
        """Forgets what an evict has let go of and no session holds; bounded work."""
        state = self.state
        for _ in range(min(len(self._purges), _MAX_LOOKS)):
            content = self._purges.popleft()
            if not state.contexts.is_held(content):
                state.slots.forget(content)
            state.gpu.forget(content)

    def _report(self, operation: Operation, handle: OperationHandle) -> None:
        if self.has_listener:
            self._events += [
                TierEvent(
                    type=TierEventType.OPERATION,
                    operation_id=operation_id,
                    handle=handle,
                )
                for operation_id in operation.operation_ids
            ]

    def _release(self, job: Job) -> None:
        """Gives back what a job held. Tails first in line, as everywhere."""
        self.state.slots.unpin(job.slots[::-1])
        if job.is_demotion:
            self.state.gpu.put_back(job.blocks)
        elif job.request_id is None:
            self.state.gpu.unpin(job.blocks)

    def _on_ended(self, job: Job) -> None:
        if job.error is not None:
            self.state.counts["failed_copies"] += 1
            self._saver.try_again(job.blocks)
        if job.direction is Direction.STORE:
            self._on_stored(job)
        elif job.request_id is not None:
            self._on_loaded(job)
            self._loads.on_job_ended(job)
        else:
            self._on_loaded(job)
            self._on_prefetched(job)
        for operation, num_blocks in job.waiters.items():
            if not operation.has_ended:
                operation.on_copied(job, num_blocks)

    def _on_stored(self, job: Job) -> None:
        state = self.state
        is_wanted = job.owner is None or any(not op.has_ended for op in job.waiters)
        if job.error is None and is_wanted and job.generation == state.generation:
            for copy in job.copies:
                state.slots.publish(copy.slot, copy.content)
            state.keep(job.contexts)
            self._count(TierEventType.SAVE, job)

    def _on_loaded(self, job: Job) -> None:
        if job.error is None:
            self._count(TierEventType.LOAD, job)
            return
        for content in job.contents:
            self.state.slots.forget(content)

    def _on_prefetched(self, job: Job) -> None:
        state = self.state
        prefetch = next(
            (op for op in job.waiters if isinstance(op, Prefetch) and not op.has_ended),
            None,
        )
        is_current = job.generation == state.generation
        if job.error is not None or not is_current or prefetch is None:
            return
        blocks = []
        for copy in job.copies:
            present = state.gpu.find(copy.content)
            if present is None:
                state.gpu.publish(copy.block, copy.content, copy.block_index)
            blocks.append(present or copy.block)  # computed meanwhile: keep that
        prefetch.hold(blocks)

    def _count(self, kind: TierEventType, job: Job) -> None:
        """Adds to the latest event, so that a busy step makes few of them."""
        if not self.has_listener:
            return
        if not self._events or self._events[-1].type is not kind:
            self._events.append(TierEvent(type=kind))
        last = self._events[-1]
        self._events[-1] = dataclasses.replace(
            last,
            num_blocks=last.num_blocks + len(job.copies),
            num_bytes=last.num_bytes + self.state.num_bytes(job.copies),
        )
