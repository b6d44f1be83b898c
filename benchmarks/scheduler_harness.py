"""The real vLLM scheduler and block pool with a model that costs nothing.

Benchmarks and tests drive the code that a server runs, down to the block table,
and replace only what needs weights: the model runner answers each step with
tokens that are a function of the request id and the position.

    scheduler = make_scheduler("sam", num_blocks=64)
    engine = FakeEngine(scheduler)
    scheduler.add_request(make_request("r0", range(100), max_tokens=4))
    finished = engine.run_until_idle()          # {"r0": [token, ...]}

``run_step(scheduler)`` does one schedule-execute-update round with nothing left in
flight. :class:`FakeEngine` steps the way ``EngineCore`` does: with
``async_scheduling=True`` two batches are in flight, a finished request's blocks are
freed only once the step that may still write them has been processed, and an abort
lands between a batch's launch and its result (:meth:`FakeEngine.abort`).

Nothing here starts threads, opens sockets or reads a clock.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.engine_config import (
    VOCAB_SIZE,
    KVShape,
    kv_cache_config,
    vllm_config,
)

__all__ = [
    "VOCAB_SIZE",
    "Batch",
    "FakeEngine",
    "KVShape",
    "check_idle_pool",
    "complete",
    "execute",
    "expected_output",
    "launch",
    "make_request",
    "make_scheduler",
    "run_step",
    "sampled_token",
]

BlockHasher = Callable[[Request], list[BlockHash]]


def make_scheduler(
    connector: str | tuple[str, str] | None = None,
    *,
    num_blocks: int = 1_000,
    block_size: int = 16,
    async_scheduling: bool = False,
    extra_config: Mapping[str, Any] | None = None,
    max_model_len: int = 131_072,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 8_192,
    sliding_window: int | None = None,
    kv_shape: KVShape | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    log_stats: bool = False,
) -> Scheduler:
    """Builds a scheduler as ``EngineCore`` does, without workers.

    Args:
        connector: ``None`` (no connector at all), a key of
            ``engine_config.CONNECTORS``, or ``(class name, module path)`` of any
            connector.
        num_blocks: blocks of the pool, the null block included.
        block_size: tokens of a block; also the size that is hashed.
        async_scheduling: the real ``AsyncScheduler`` with two batches in flight,
            which is what a GPU server runs by default.
        extra_config: ``kv_connector_extra_config``.
        max_model_len: longest context, in tokens.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: tokens of one step; longer prompts are chunked.
        sliding_window: adds a second KV cache group with this window in tokens.
        kv_shape: layers and groups of the KV cache, if not the usual.
        tensor_parallel_size: ranks of each stage.
        pipeline_parallel_size: stages; also the batches in flight, if more than one.
        log_stats: as the server's switch; off keeps timing to the scheduler itself.
    """
    init_none_hash(sha256)
    config = vllm_config(
        connector=connector,
        block_size=block_size,
        async_scheduling=async_scheduling,
        extra_config=dict(extra_config or {}),
        max_model_len=max_model_len,
        max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    shape = kv_shape or KVShape(sliding_window=sliding_window)
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler_class = AsyncScheduler if async_scheduling else Scheduler
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache_config(config, num_blocks, shape),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=log_stats,
    )


def make_request(
    request_id: str,
    prompt_token_ids: Iterable[int],
    *,
    max_tokens: int = 1,
    session_id: str | None = None,
    agent_hint: Mapping[str, Any] | None = None,
    block_size: int = 16,
    cache_salt: str | None = None,
    prompt_hashes: Sequence[BlockHash] | None = None,
) -> Request:
    """Builds a request as the engine sees it, block hashes included.

    Args:
        agent_hint: goes to ``kv_transfer_params["agent_hint"]``, the way a hint
            arrives with or without the middleware.
        block_size: must be the scheduler's.
        prompt_hashes: ``block_hashes`` of an earlier request with this prompt, to
            save hashing it again.
    """
    init_none_hash(sha256)
    hasher = _block_hasher(block_size)
    if prompt_hashes is not None:
        hasher = _skip_prompt(hasher, prompt_hashes)
    extra_args = None
    if agent_hint is not None:
        extra_args = {"kv_transfer_params": {"agent_hint": dict(agent_hint)}}
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args=extra_args,
        ),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hasher,
        session_id=session_id,
        cache_salt=cache_salt,
    )


def sampled_token(request_id: str, position: int) -> int:
    """The fake model: what it says at ``position`` of ``request_id``."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % VOCAB_SIZE


def expected_output(request_id: str, num_prompt: int, max_tokens: int) -> list[int]:
    """All that a request will be answered, whatever happens on the way."""
    return [sampled_token(request_id, num_prompt + i) for i in range(max_tokens)]


@dataclass(slots=True)
class Batch:
    """One scheduled step whose result is not processed yet."""

    scheduler_output: SchedulerOutput
    model_output: ModelRunnerOutput


#: Called once per step with what was scheduled; stands in for the workers' connector.
ConnectorWorker = Callable[[SchedulerOutput], KVConnectorOutput | None]


def launch(scheduler: Scheduler, worker: ConnectorWorker | None = None) -> Batch:
    """Schedules one step and runs the fake model on it; updates nothing.

    Must be followed by ``complete`` in the order of the launches.
    """
    scheduler_output = scheduler.schedule()
    return Batch(scheduler_output, execute(scheduler, scheduler_output, worker))


def execute(
    scheduler: Scheduler,
    scheduler_output: SchedulerOutput,
    worker: ConnectorWorker | None = None,
) -> ModelRunnerOutput:
    """The fake model's answer to a step that was scheduled just now."""
    req_ids = list(scheduler_output.num_scheduled_tokens)
    tokens = []
    for req_id in req_ids:
        request = scheduler.requests[req_id]
        # A chunk that does not reach the end of the prompt samples nothing.
        tokens.append(
            []
            if request.is_prefill_chunk
            else [sampled_token(req_id, request.num_computed_tokens)]
        )
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=tokens,
        kv_connector_output=worker(scheduler_output) if worker else None,
    )


def complete(scheduler: Scheduler, batch: Batch) -> dict[int, EngineCoreOutputs]:
    """Processes the result of the oldest batch in flight."""
    return scheduler.update_from_output(batch.scheduler_output, batch.model_output)


def run_step(
    scheduler: Scheduler, worker: ConnectorWorker | None = None
) -> dict[int, EngineCoreOutputs]:
    """One whole step with nothing left in flight; works with either scheduler."""
    return complete(scheduler, launch(scheduler, worker))


class FakeEngine:
    """Steps a scheduler the way ``EngineCore`` does, in one thread.

    Attributes:
        scheduler: the scheduler being stepped.
        in_flight: batches launched and not processed, oldest first. At most one
            between calls, with async scheduling; none without.
        outputs: tokens that were returned so far, by request id.
        finished: ids whose final output was returned.
        num_steps: batches processed.
    """

    def __init__(
        self, scheduler: Scheduler, worker: ConnectorWorker | None = None
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.max_in_flight = scheduler.vllm_config.max_concurrent_batches
        self.in_flight: deque[Batch] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.num_steps = 0
        self._aborts: list[str] = []

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.scheduler.has_requests()

    def step(self) -> dict[int, EngineCoreOutputs]:
        """One engine iteration; returns what reached the client.

        With two batches in flight the first call only launches, as
        ``EngineCore.step_with_batch_queue`` does.
        """
        if self.scheduler.has_requests():
            batch = launch(self.scheduler, self.worker)
            self.in_flight.append(batch)
            executed = batch.scheduler_output.total_num_scheduled_tokens > 0
            if len(self.in_flight) < self.max_in_flight and (
                executed or self.scheduler.has_requests()
            ):
                return {}
        return self.complete_oldest()

    def complete_oldest(self) -> dict[int, EngineCoreOutputs]:
        """Processes the oldest batch without launching another."""
        if not self.in_flight:
            return {}
        batch = self.in_flight.popleft()
        self._process_aborts()
        outputs = complete(self.scheduler, batch)
        self.num_steps += 1
        self._record(outputs)
        return outputs

    def abort(self, request_id: str) -> None:
        """Queues an abort: taken after the next model result, before its update."""
        self._aborts.append(request_id)

    def run_until_idle(self, max_steps: int = 100_000) -> dict[str, list[int]]:
        """Steps until no request is left; returns all tokens by request id.

        Raises:
            RuntimeError: the scheduler still has requests after ``max_steps``.
        """
        for _ in range(max_steps):
            if self.is_idle:
                return self.outputs
            self.step()
        raise RuntimeError(f"not idle after {max_steps} steps")

    def _process_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        if aborts:
            self.scheduler.finish_requests(aborts, RequestStatus.FINISHED_ABORTED)

    def _record(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                tokens = self.outputs.setdefault(output.request_id, [])
                tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)


def check_idle_pool(scheduler: Scheduler) -> None:
    """Leak check: with no request left every block but the null one is free.

    Raises:
        AssertionError: blocks, reference counts or deferred frees are left over.
    """
    pool = scheduler.kv_cache_manager.block_pool
    assert not scheduler.requests, sorted(scheduler.requests)
    assert not scheduler.deferred_frees, len(scheduler.deferred_frees)
    held = [b for b in pool.blocks if b.ref_cnt and not b.is_null]
    assert not held, held[:5]
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    listed = pool.free_block_queue.get_all_free_blocks()
    assert len({b.block_id for b in listed}) == pool.num_gpu_blocks - 1, len(listed)


@functools.cache
def _block_hasher(block_size: int) -> BlockHasher:
    return get_request_block_hasher(block_size, sha256)


def _skip_prompt(
    hasher: BlockHasher, prompt_hashes: Sequence[BlockHash]
) -> BlockHasher:
    def known_or_hashed(request: Request) -> list[BlockHash]:
        return hasher(request) if request.block_hashes else list(prompt_hashes)

    return known_or_hashed
