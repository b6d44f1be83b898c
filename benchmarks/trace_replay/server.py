"""A server in virtual time around vLLM's real ``KVCacheManager``.

Requests are admitted first come, first served, while the prompts under way leave room
in a step: one that does not fit the pool waits, and so does everything behind it but
requests that wait for a load. Blocks of a running request are in use until it ends.
Room for output is taken ``growth_tokens`` at a time, the first at admission; where
there is none the request that was admitted last is preempted, as vLLM does: its blocks
are freed and it waits at the front. ``compute`` says what a step takes and ``link``
what a copy takes; a copy that was started in a step begins at its end, and is heard of
at the end of the step in which it ends.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from benchmarks.trace_replay.compute import Compute, Work
from benchmarks.trace_replay.engine_parts import (
    engine_config,
    make_kv_cache_manager,
    make_request,
)
from benchmarks.trace_replay.link import HostLink
from benchmarks.trace_replay.loop import ClosedLoop
from benchmarks.trace_replay.policies import CopyOrder, Policy
from benchmarks.trace_replay.records import Replay, Served, ServiceModel
from benchmarks.trace_replay.usage import Usage
from benchmarks.trace_replay.workload import Turn, Workload
from sam_connector.transfer.contract import Direction


@dataclass(slots=True, eq=False)
class _Job:
    """A request from arrival to end."""

    turn: Turn
    request: Request
    arrival_s: float
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    is_loading: bool = False
    has_loaded: bool = False
    work: Work | None = None

    @property
    def num_output_left(self) -> int:
        return self.turn.num_tokens - self.request.num_tokens


class VirtualServer:
    """Runs a workload once, closed loop, under one policy."""

    def __init__(
        self,
        workload: Workload,
        *,
        pool_tokens: int,
        policy: Policy,
        service: ServiceModel | None = None,
        max_model_len: int = 131_072,
    ) -> None:
        self.workload = workload
        self.policy = policy
        self.service = service or ServiceModel()
        # One block more than the pool: vLLM keeps the null block for itself.
        num_blocks = pool_tokens // workload.block_size + 1
        _, cache_config = engine_config(num_blocks, workload.block_size, max_model_len)
        self.manager = make_kv_cache_manager(
            cache_config, workload.block_size, max_model_len
        )
        self.now_s = 0.0
        self.compute = Compute(self.service)
        self.link = HostLink(self.service.link_bytes_per_s)
        self._loop = ClosedLoop(workload)
        self._block_bytes = self.service.kv_bytes_per_token * workload.block_size
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._waiting: deque[_Job] = deque()
        self._loaders: dict[str, _Job] = {}
        self._running: list[_Job] = []
        self._next_tick_s = math.inf
        self._num_preemptions = 0
        self._num_prefetched = 0
        self._computed: set[BlockHash] = set()
        self._served: dict[int, Served] = {}
        self._usage = Usage(self.manager, policy)
        policy.attach(self.manager, cache_config, workload)

    def run(self) -> Replay:
        for turn in self._loop.first():
            self._get_ready(turn)
        while True:
            compute_s = self.now_s + self.compute.time_to_next()
            event_s = self._events[0][0] if self._events else math.inf
            if compute_s == event_s == math.inf:
                break
            self._advance(min(compute_s, event_s), is_next=compute_s <= event_s)
            for handler in self.compute.take_due():
                handler()
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            self._admit()
            self._step()
        if len(self._served) != len(self.workload.turns):
            raise RuntimeError(f"{len(self._waiting)} requests never fit the pool")
        return self._replay()

    def _replay(self) -> Replay:
        num_wasted = self._num_prefetched - self.policy.num_prefetched_blocks_used()
        return Replay(
            served=[self._served[turn.index] for turn in self.workload.turns],
            use_peak=self._usage.in_use.peak,
            use_mean=self._usage.in_use.mean(self.now_s),
            kept_peak=self._usage.kept.peak,
            kept_mean=self._usage.kept.mean(self.now_s),
            num_preemptions=self._num_preemptions,
            bytes_moved=self.link.num_bytes,
            bytes_prefetched=self._num_prefetched * self._block_bytes,
            bytes_wasted=max(0, num_wasted) * self._block_bytes,
            counts=self.policy.counts(),
        )

    # --- time -------------------------------------------------------------------------

    def _advance(self, time_s: float, *, is_next: bool) -> None:
        self._usage.advance(time_s)
        self.compute.advance(time_s - self.now_s, is_next=is_next)
        self.now_s = time_s
        self.compute.busy_directions = self.link.num_busy(time_s)
        self.policy.advance(time_s)

    def _at(self, time_s: float, handler: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), handler))

    def _step(self) -> None:
        """What the connector does once in every step; here only when it has to."""
        for order in self.policy.on_step():
            self._copy(order)
        if self.policy.is_due and self._next_tick_s <= self.now_s:
            self._next_tick_s = math.inf
        if self.policy.is_due and self._next_tick_s == math.inf:
            self._next_tick_s = self.now_s + max(self.compute.step_s, 1e-6)
            self._at(self._next_tick_s, self._tick)

    def _tick(self) -> None:
        self._next_tick_s = math.inf

    # --- copies -----------------------------------------------------------------------

    def _copy(self, order: CopyOrder) -> None:
        is_store = order.direction is Direction.STORE
        start_s = self.now_s + (self.compute.step_s if is_store else 0.0)
        num_bytes = order.num_blocks * self._block_bytes
        if order.is_prefetch:
            self._num_prefetched += order.num_blocks
        end_s = self.link.copy(order.direction, num_bytes, start_s)
        # Reports come with the output of a step.
        step_s = self.compute.step_s
        if step_s:
            num_steps = math.ceil((end_s - self.now_s) / step_s)
            end_s = self.now_s + num_steps * step_s
        self._at(end_s, lambda: self._copied(order))

    def _copied(self, order: CopyOrder) -> None:
        failed = order.num_blocks == 0
        self.policy.on_copied(order.job_id, failed=failed)
        if order.request_id is None:
            return
        job = self._loaders[order.request_id]
        job.is_loading = False
        request = job.request
        if failed:
            del self._loaders[request.request_id]
            self.manager.free(request)
            request.num_computed_tokens = 0
            job.loaded_tokens = job.cached_tokens = 0
        else:
            self.manager.cache_blocks(request, request.num_computed_tokens)
            job.has_loaded = True

    # --- requests ---------------------------------------------------------------------

    def _get_ready(self, turn: Turn) -> None:
        self.policy.on_ready(turn)
        self._at(self.now_s + turn.gap_s, lambda: self._arrive(turn))

    def _arrive(self, turn: Turn) -> None:
        job = _Job(turn, make_request(turn), self.now_s)
        self.policy.on_arrival(turn, job.request)
        self._waiting.append(job)
        for follower in self._loop.started(turn):
            self._get_ready(follower)

    def _admit(self) -> None:
        skipped: list[_Job] = []
        while self._waiting:
            if self.compute.prefill_tokens >= self.service.max_batched_tokens:
                break
            job = self._waiting[0]
            if not job.is_loading:
                admitted = self._try_start(job)
                if admitted is False:
                    break
                if admitted:
                    self._waiting.popleft()
                    continue
            skipped.append(self._waiting.popleft())
        self._waiting.extendleft(reversed(skipped))

    def _try_start(self, job: _Job) -> bool | None:
        """Whether the request runs now; ``None``: it waits, and holds up nobody."""
        if job.has_loaded:
            return self._start_loaded(job)
        request = job.request
        blocks, num_local, _ = self.manager.get_computed_blocks(request)
        num_external = self.policy.look_up(request, num_local)
        if num_external is None:
            return None
        is_load = num_external > 0 and not self.policy.loads_are_free
        num_cached = num_local + num_external
        num_new = request.num_tokens - num_cached
        allocated = self.manager.allocate_slots(
            request,
            0 if is_load else num_new,
            num_new_computed_tokens=num_local,
            new_computed_blocks=blocks,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=is_load,
            num_lookahead_tokens=0 if is_load else self._next_growth(job),
            reserved_blocks=self._num_reserved(job, num_cached) if is_load else 0,
        )
        if allocated is None:
            return False
        self._note_hit(job, num_cached, num_external)
        self.policy.on_blocks_assigned(
            job.turn,
            request,
            self.manager.get_blocks(request.request_id),
            num_external,
        )
        if is_load:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = num_cached
            job.is_loading = True
            self._loaders[request.request_id] = job
            return None
        self._run(job, num_cached, num_new)
        return True

    def _start_loaded(self, job: _Job) -> bool:
        request = job.request
        num_cached = min(request.num_computed_tokens, request.num_tokens - 1)
        num_new = request.num_tokens - num_cached
        request.num_computed_tokens = num_cached
        allocated = self.manager.allocate_slots(
            request, num_new, num_lookahead_tokens=self._next_growth(job)
        )
        if allocated is None:
            return False
        job.has_loaded = False
        del self._loaders[request.request_id]
        blocks = self.manager.get_blocks(request.request_id)
        self.policy.on_blocks_assigned(job.turn, request, blocks, 0)
        self._run(job, num_cached, num_new)
        return True

    def _num_reserved(self, job: _Job, num_cached: int) -> int:
        """Blocks to leave for the rest of requests that load: they hold what they
        have without getting on, and must not wait for each other."""
        loaders = [(job, num_cached)]
        loaders += [(j, j.request.num_computed_tokens) for j in self._loaders.values()]
        block_size = self.workload.block_size
        return sum(
            -(-(other.request.num_tokens + self._next_growth(other)) // block_size)
            - held // block_size
            for other, held in loaders
        )

    def _note_hit(self, job: _Job, num_cached: int, num_external: int) -> None:
        if job.admitted_s < 0:
            job.admitted_s = self.now_s
            job.cached_tokens = num_cached
            job.loaded_tokens = num_external

    def _run(self, job: _Job, num_cached: int, num_new: int) -> None:
        request = job.request
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        self._running.append(job)
        self.policy.on_admitted(job.turn, request, num_cached)
        job.recomputed_tokens += self._count_recomputed(request, num_cached)
        # Its first token comes with the step after.
        job.work = self.compute.prefill(num_new, lambda: self._decode_first(job))

    def _decode_first(self, job: _Job) -> None:
        if job.first_token_s >= 0:
            self._decode(job)
            return
        job.work = self.compute.decode(
            1,
            lambda: self._first_token(job),
            context_tokens=job.request.num_tokens,
        )

    def _first_token(self, job: _Job) -> None:
        job.first_token_s = self.now_s
        self._decode(job, num_done=1)

    def _decode(self, job: _Job, *, num_done: int = 0) -> None:
        """Goes on until the room taken so far is full."""
        num_steps = max(0, self._next_growth(job) - num_done)
        job.work = self.compute.decode(
            num_steps,
            lambda: self._output_ready(job),
            context_tokens=job.request.num_tokens,
        )

    def _next_growth(self, job: _Job) -> int:
        return min(self.service.growth_tokens, job.num_output_left)

    def _output_ready(self, job: _Job) -> None:
        request, start = job.request, job.request.num_tokens
        output = job.turn.context.token_ids[start : start + self._next_growth(job)]
        request.append_output_token_ids(output)
        if job.num_output_left == 0:
            self._finish(job)
        elif self._grow(job, len(output)):
            self._decode(job)

    def _grow(self, job: _Job, num_new: int) -> bool:
        """Takes room for more output; false if that cost the job its own blocks."""
        while True:
            allocated = self.manager.allocate_slots(
                job.request, num_new, num_lookahead_tokens=self._next_growth(job)
            )
            if allocated is not None:
                job.request.num_computed_tokens = job.request.num_tokens
                return True
            victim = self._running.pop()
            self._preempt(victim)
            if victim is job:
                return False

    def _preempt(self, job: _Job) -> None:
        self._num_preemptions += 1
        self.manager.free(job.request)
        if job.work is not None:
            self.compute.cancel(job.work)
        job.request.num_computed_tokens = 0
        job.request.status = RequestStatus.PREEMPTED
        self._waiting.appendleft(job)

    def _finish(self, job: _Job) -> None:
        turn, request = job.turn, job.request
        # The last token was sampled but never fed back: it has no KV.
        request.num_computed_tokens = request.num_tokens - 1
        self.manager.cache_blocks(request, request.num_computed_tokens)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._running.remove(job)
        self.policy.before_free(turn, request)
        self.manager.free(request)
        num_full = request.num_computed_tokens // self.workload.block_size
        self._computed.update(request.block_hashes[:num_full])
        self._record(job)
        self.policy.on_answer(turn)
        self._usage.sample()
        for follower in self._loop.ended(turn):
            self._get_ready(follower)

    def _record(self, job: _Job) -> None:
        self._served[job.turn.index] = Served(
            index=job.turn.index,
            arrival_s=job.arrival_s,
            admitted_s=job.admitted_s,
            first_token_s=job.first_token_s,
            end_s=self.now_s,
            input_tokens=job.turn.input_tokens,
            output_tokens=job.turn.output_tokens,
            cached_tokens=job.cached_tokens,
            loaded_tokens=job.loaded_tokens,
            recomputed_tokens=job.recomputed_tokens,
        )

    def _count_recomputed(self, request: Request, num_cached: int) -> int:
        """Tokens about to be computed whose content was computed before."""
        block_size = self.workload.block_size
        missed = request.block_hashes[num_cached // block_size :]
        again = sum(block_hash in self._computed for block_hash in missed)
        self._computed.update(missed)
        return again * block_size
