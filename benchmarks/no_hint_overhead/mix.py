"""An agent-like mix of requests, prepared before the clock runs.

Agents re-send a growing, append-only context. All of an agent's prompts follow from
the fake model's answers, so every arm is given the same requests in the same order;
what differs is the connector and whether a hint goes along.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from benchmarks.no_hint_overhead.timing import NS_PER_S, StepTimer
from benchmarks.scheduler_harness import (
    VOCAB_SIZE,
    check_idle_pool,
    expected_output,
    make_request,
    make_scheduler,
)
from sam_connector.connector.metadata import RankResult, WorkerReport

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MixShape:
    """Sizes in tokens.

    The pool holds four fifths of what the agents' contexts come to, so that blocks
    are reused all the time.
    """

    num_agents: int = 16
    num_turns: int = 5
    first_prompt: tuple[int, int] = (1_000, 8_000)
    new_input: tuple[int, int] = (50, 1_500)
    output: tuple[int, int] = (50, 400)
    num_blocks: int = 7_000
    max_running: int = 16
    async_scheduling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """One request before it is built for an arm."""

    request_id: str
    session_id: str
    parent_id: str | None
    prompt_token_ids: list[int]
    prompt_hashes: list[BlockHash]
    max_tokens: int
    is_last: bool


Hinter = Callable[[PlannedTurn], dict[str, Any] | None]


def no_hint(turn: PlannedTurn) -> None:
    return None


def agent_hint(turn: PlannedTurn) -> dict[str, Any]:
    """What a harness says: kept while a tool runs, evicted at the end."""
    hint: dict[str, Any] = {"session_id": turn.session_id}
    if turn.parent_id is not None:
        hint["parent_session_id"] = turn.parent_id
    if turn.is_last:
        hint["context_management"] = {"edits": [{"type": "evict"}]}
    else:
        hint["cache_control"] = {"ttl": 60.0}
    return hint


def plan(shape: MixShape, seed: int = 0) -> list[list[PlannedTurn]]:
    """The mix in rounds; the requests of one round run together."""
    rng = random.Random(seed)
    agents = [_agent_turns(shape, rng, index) for index in range(shape.num_agents)]
    return [list(turns) for turns in zip(*agents, strict=True)]


def _agent_turns(shape: MixShape, rng: random.Random, agent: int) -> list[PlannedTurn]:
    lead = agent - agent % 4
    tokens = _tokens(rng, rng.randint(*shape.first_prompt))
    turns = []
    for number in range(shape.num_turns):
        request_id = f"agent-{agent}-turn-{number}"
        max_tokens = rng.randint(*shape.output)
        turns.append(
            PlannedTurn(
                request_id=request_id,
                session_id=f"agent-{agent}",
                parent_id=None if agent == lead else f"agent-{lead}",
                prompt_token_ids=tokens,
                prompt_hashes=make_request(
                    "", tokens, block_size=BLOCK_SIZE
                ).block_hashes,
                max_tokens=max_tokens,
                is_last=number == shape.num_turns - 1,
            )
        )
        answer = expected_output(request_id, len(tokens), max_tokens)
        tokens = tokens + answer + _tokens(rng, rng.randint(*shape.new_input))
    return turns


def finish_copies(scheduled: SchedulerOutput) -> KVConnectorOutput | None:
    """A rank that is done with every copy at once: what deciding costs, no bytes."""
    metadata = scheduled.kv_connector_metadata
    jobs = getattr(metadata, "jobs", ())
    if not jobs:
        return None
    results = frozenset(RankResult(0, job.job_id, None) for job in jobs)
    return KVConnectorOutput(
        finished_recving=set(metadata.request_ids.values()),
        kv_connector_worker_meta=WorkerReport(results),
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=count)


def build(rounds: list[list[PlannedTurn]], hinter: Hinter) -> list[list[Request]]:
    """Requests of one run; hashing prompts is not the scheduler's work."""
    return [
        [
            make_request(
                turn.request_id,
                turn.prompt_token_ids,
                prompt_hashes=turn.prompt_hashes,
                max_tokens=turn.max_tokens,
                agent_hint=hinter(turn),
                block_size=BLOCK_SIZE,
            )
            for turn in turns
        ]
        for turns in rounds
    ]


#: Settings of an arm with the host tier, which has room for twice the pool.
WITH_TIER: Mapping[str, Any] = {"host_bytes": "8MiB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the servers that are compared; ``settings`` are the connector's."""

    connector: str
    hinter: Hinter = no_hint
    settings: Mapping[str, Any] = field(default_factory=dict)


class MixRun:
    """One arm on its way through the mix, a round at a time.

    Arms that take turns after every round share whatever else the machine does.
    """

    def __init__(
        self, shape: MixShape, rounds: list[list[PlannedTurn]], arm: Arm
    ) -> None:
        self.scheduler = make_scheduler(
            arm.connector,
            num_blocks=shape.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=shape.max_running,
            extra_config=arm.settings,
        )
        worker = finish_copies if arm.settings else None
        self.timer = StepTimer(self.scheduler, worker)
        self._rounds = iter(build(rounds, arm.hinter))

    def serve_round(self) -> None:
        requests = next(self._rounds)
        for request in requests:
            self.timer.add(request)
        while self.scheduler.has_unfinished_requests():
            self.timer.step()

    def close(self) -> float:
        """Checks for leaks; returns the CPU seconds of the scheduler."""
        cpu_s = self.timer.total_ns / NS_PER_S
        while self.scheduler.has_requests():
            self.timer.step()
        check_idle_pool(self.scheduler)
        self.scheduler.shutdown()
        return cpu_s
