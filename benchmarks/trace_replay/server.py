"""A server in virtual time around vLLM's real ``KVCacheManager``.

Service model. Requests are admitted first come, first served: one that does not
fit waits, and so does everything behind it. Blocks of a running request are in use
until it ends. Prefill is one queue of ``prefill_tokens_per_s``, first come, first
served, for the tokens that were not in the cache; a decode step takes
``decode_step_s`` whatever else runs. Room for output is taken ``growth_tokens`` at a
time, the first at admission; where there is none the request that was admitted last
is preempted, as vLLM does: its blocks are freed and it waits at the front.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from benchmarks.trace_replay.engine_parts import make_kv_cache_manager, make_request
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.records import Replay, Served, ServiceModel
from benchmarks.trace_replay.workload import Turn, Workload


@dataclass(slots=True, eq=False)
class _Job:
    """A request from arrival to end."""

    turn: Turn
    request: Request
    arrival_s: float
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    # Events of an earlier admission find a newer number here and do nothing.
    admission: int = 0

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
        self.manager = make_kv_cache_manager(
            num_blocks, workload.block_size, max_model_len
        )
        self.now_s = 0.0
        self._followers = workload.followers()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._num_preemptions = 0
        self._prefill_free_s = 0.0
        self._computed: set[BlockHash] = set()
        self._served: dict[int, Served] = {}
        self._use_peak = 0.0
        self._use_area = 0.0
        policy.attach(self.manager, workload)

    def run(self) -> Replay:
        for turn in self.workload.turns:
            if turn.after is None:
                self._arrive_at(turn.offset_s, turn)
        while self._events:
            time_s, _, handler = heapq.heappop(self._events)
            self._advance(time_s)
            handler()
            self._admit()
        if len(self._served) != len(self.workload.turns):
            raise RuntimeError(f"{len(self._waiting)} requests never fit the pool")
        return Replay(
            served=[self._served[turn.index] for turn in self.workload.turns],
            use_peak=self._use_peak,
            use_mean=self._use_area / self.now_s,
            num_preemptions=self._num_preemptions,
        )

    def _advance(self, time_s: float) -> None:
        usage = self.manager.usage
        self._use_peak = max(self._use_peak, usage)
        self._use_area += usage * (time_s - self.now_s)
        self.now_s = time_s
        self.policy.advance(time_s)

    def _at(self, time_s: float, handler: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._sequence), handler))

    def _arrive_at(self, time_s: float, turn: Turn) -> None:
        self._at(time_s, lambda: self._arrive(turn))

    def _arrive(self, turn: Turn) -> None:
        job = _Job(turn, make_request(turn), self.now_s)
        self.policy.on_arrival(turn, job.request)
        self._waiting.append(job)
        self._start_followers(turn, after_start=True)

    def _start_followers(self, turn: Turn, *, after_start: bool) -> None:
        for follower in self._followers.get(turn.index, ()):
            if follower.after_start is after_start:
                self._arrive_at(self.now_s + follower.offset_s, follower)

    def _admit(self) -> None:
        while self._waiting and self._try_start(self._waiting[0]):
            self._waiting.popleft()

    def _try_start(self, job: _Job) -> bool:
        request = job.request
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_cached
        allocated = self.manager.allocate_slots(
            request,
            num_new,
            num_new_computed_tokens=num_cached,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self._next_growth(job),
        )
        if allocated is None:
            return False
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        self._running.append(job)
        self.policy.on_admitted(job.turn, request, num_cached)
        self._prefill(job, num_cached, num_new)
        return True

    def _prefill(self, job: _Job, num_cached: int, num_new: int) -> None:
        job.recomputed_tokens += self._count_recomputed(job.request, num_cached)
        prefill_s = num_new / self.service.prefill_tokens_per_s
        self._prefill_free_s = max(self._prefill_free_s, self.now_s) + prefill_s
        if job.first_token_s < 0:
            job.admitted_s = self.now_s
            job.first_token_s = self._prefill_free_s
            job.cached_tokens = num_cached
        self._decode_from(job, self._prefill_free_s, tokens_done=1)

    def _decode_from(self, job: _Job, time_s: float, *, tokens_done: int) -> None:
        """Plans the moment when the room taken so far is full."""
        num_steps = max(0, self._next_growth(job) - tokens_done)
        full_s = time_s + num_steps * self.service.decode_step_s
        admission = job.admission

        def wake() -> None:
            if job.admission == admission:
                self._output_ready(job)

        self._at(full_s, wake)

    def _next_growth(self, job: _Job) -> int:
        return min(self.service.growth_tokens, job.num_output_left)

    def _output_ready(self, job: _Job) -> None:
        request, start = job.request, job.request.num_tokens
        output = job.turn.context.token_ids[start : start + self._next_growth(job)]
        request.append_output_token_ids(output)
        if job.num_output_left == 0:
            self._finish(job)
        elif self._grow(job, len(output)):
            self._decode_from(job, self.now_s, tokens_done=0)

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
        job.admission += 1
        job.request.num_computed_tokens = 0
        job.request.status = RequestStatus.PREEMPTED
        self._waiting.appendleft(job)
        self.policy.on_preempted(job.turn, job.request)

    def _finish(self, job: _Job) -> None:
        turn, request = job.turn, job.request
        # The last token was sampled but never fed back: it has no KV.
        request.num_computed_tokens = request.num_tokens - 1
        self.manager.cache_blocks(request, request.num_computed_tokens)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._running.remove(job)
        self.policy.before_free(turn, request)
        self.manager.free(request)
        self.policy.after_free(turn, request)
        num_full = request.num_computed_tokens // self.workload.block_size
        self._computed.update(request.block_hashes[:num_full])
        self._record(job)
        self._start_followers(turn, after_start=False)

    def _record(self, job: _Job) -> None:
        self._served[job.turn.index] = Served(
            index=job.turn.index,
            arrival_s=job.arrival_s,
            admitted_s=job.admitted_s,
            first_token_s=job.first_token_s,
            end_s=self.now_s,
            input_tokens=job.turn.input_tokens,
            cached_tokens=job.cached_tokens,
            recomputed_tokens=job.recomputed_tokens,
        )

    def _count_recomputed(self, request: Request, num_cached: int) -> int:
        """Tokens about to be computed whose content was computed before."""
        block_size = self.workload.block_size
        missed = request.block_hashes[num_cached // block_size :]
        again = sum(block_hash in self._computed for block_hash in missed)
        self._computed.update(missed)
        return again * block_size
