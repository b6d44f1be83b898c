"""Sixty-four requests that decode at once, each with a context of 128K tokens.

Nothing is behind the blocks but their metadata, so that a pool of half a million
blocks costs no more than its Python objects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash

from benchmarks.no_hint_overhead.mix import BLOCK_SIZE
from benchmarks.no_hint_overhead.timing import Ratio, StepTimer, quiet_gc
from benchmarks.scheduler_harness import check_idle_pool, make_request, make_scheduler

HASH_BYTES = 32
#: Steps between two changes of the arm: each request fills one block meanwhile.
STEPS_PER_TURN = BLOCK_SIZE
TTL_S = 600.0

#: Name, connector, and whether requests name a session.
ARMS: dict[str, tuple[str, bool]] = {
    "stock": ("null", False),
    "no_hints": ("sam", False),
    "hints": ("sam", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many requests decode, with how long a context, for how many steps."""

    num_requests: int = 64
    context_blocks: int = 8_192
    num_turns: int = 24

    @property
    def num_steps(self) -> int:
        return self.num_turns * STEPS_PER_TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCosts:
    """Ours over stock.

    Attributes:
        step: of a step in which all requests decode.
        finish: of a step in which one of them ends and its blocks are freed.
        admit: of all the first steps, one measurement of each arm.
        stock_step_us: what such a step costs in stock vLLM.
    """

    step: Ratio
    finish: Ratio
    admit: float
    stock_step_us: float


class LongRunners:
    """A scheduler on which long contexts decode.

    Args:
        connector: the arm.
        hinted: whether each request names a session and asks for a lease.
        shape: sizes.
        contents: block hashes of every prompt; what is in them does not matter.
    """

    def __init__(
        self,
        connector: str,
        *,
        hinted: bool,
        shape: Shape,
        contents: Sequence[Sequence[BlockHash]],
    ) -> None:
        num_tokens = shape.context_blocks * BLOCK_SIZE
        grown = shape.context_blocks + shape.num_turns + 8
        self.scheduler = make_scheduler(
            connector,
            num_blocks=shape.num_requests * grown + 1,
            block_size=BLOCK_SIZE,
            max_num_seqs=shape.num_requests,
            max_num_batched_tokens=shape.num_requests * (num_tokens + BLOCK_SIZE),
            max_model_len=2 * num_tokens,
        )
        self.timer = StepTimer(self.scheduler)
        for number, hashes in enumerate(contents):
            hint = {"session_id": f"agent-{number}", "cache_control": {"ttl": TTL_S}}
            # They end one after the other, a few steps past the last measured one.
            max_tokens = 2 + shape.num_steps + number
            self.timer.add(
                make_request(
                    f"request-{number}",
                    # Requests fill a block in different steps.
                    [number] * (num_tokens + number % BLOCK_SIZE),
                    max_tokens=max_tokens,
                    agent_hint=hint if hinted else None,
                    block_size=BLOCK_SIZE,
                    prompt_hashes=hashes,
                )
            )

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def admit(self) -> float:
        """Everything up to the first token; returns its CPU time."""
        before_ns = self.timer.total_ns
        self.timer.step()
        return float(self.timer.total_ns - before_ns)

    def decode(self, num_steps: int) -> float:
        """CPU time of so many steps."""
        before_ns = self.timer.total_ns
        for _ in range(num_steps):
            self.timer.step()
        return float(self.timer.total_ns - before_ns)

    def close(self) -> None:
        self.timer.step()
        check_idle_pool(self.scheduler)
        self.scheduler.shutdown()


def measure_running(shape: Shape) -> dict[str, RunningCosts]:
    """Costs of the arms by name; they take turns."""
    contents = _contents(shape)
    runs = {
        name: LongRunners(connector, hinted=hinted, shape=shape, contents=contents)
        for name, (connector, hinted) in ARMS.items()
    }
    names = list(runs)
    step_ns: dict[str, list[float]] = {name: [] for name in names}
    finish_ns: dict[str, list[float]] = {name: [] for name in names}
    with quiet_gc():
        admit_ns = {name: run.admit() for name, run in runs.items()}
        for turn in range(shape.num_turns):
            for name in _rotated(names, turn):
                _check_running(runs[name], shape.num_requests)
                step_ns[name].append(runs[name].decode(STEPS_PER_TURN))
        for number in range(shape.num_requests):
            for name in _rotated(names, number):
                finish_ns[name].append(runs[name].decode(1))
    for run in runs.values():
        _check_running(run, 0)
        run.close()
    stock_ns = sorted(step_ns["stock"])[shape.num_turns // 2]
    return {
        name: RunningCosts(
            step=Ratio.of(step_ns[name], step_ns["stock"]),
            finish=Ratio.of(finish_ns[name], finish_ns["stock"]),
            admit=admit_ns[name] / admit_ns["stock"],
            stock_step_us=stock_ns / STEPS_PER_TURN / 1e3,
        )
        for name in names[1:]
    }


def _contents(shape: Shape) -> list[list[BlockHash]]:
    rng = random.Random(0)
    return [
        [BlockHash(rng.randbytes(HASH_BYTES)) for _ in range(shape.context_blocks)]
        for _ in range(shape.num_requests)
    ]


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _check_running(run: LongRunners, expected: int) -> None:
    if run.num_running != expected:
        raise RuntimeError(f"{run.num_running} requests run, not {expected}")
