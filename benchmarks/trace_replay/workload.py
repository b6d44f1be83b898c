"""From recorded traces to turns with content, causes and gaps.

A trace holds lengths and times only; ``benchmarks.demo.workload`` says what waits for
what, which context a request extends and what an agents' harness knows. Here every
turn gets token ids and their block hashes, so that equal content has equal hashes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, init_none_hash

from benchmarks.demo.workload import Next, TraceRow, build_workload
from benchmarks.demo.workload import Workload as Plan

VOCAB_SIZE = 32_000


@dataclass(slots=True, eq=False)
class Context:
    """Content that only grows; one token array serves every request that uses it.

    Attributes:
        num_tokens: the longest content reached.
        shared: names a stream that its first tokens are of.
        num_shared: how many of them.
        token_ids: of all of it.
        block_hashes: vLLM's chained hashes of its full blocks.
    """

    name: str
    num_tokens: int = 0
    shared: str | None = None
    num_shared: int = 0
    block_size: int = 0
    token_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)

    def fill(self, block_size: int) -> None:
        """Draws the tokens and hashes them as vLLM does."""
        num_shared = min(self.num_shared, self.num_tokens) if self.shared else 0
        self.token_ids = _random_tokens(self.shared or "", num_shared)
        self.token_ids += _random_tokens(self.name, self.num_tokens - num_shared)
        self.block_size = block_size
        self.block_hashes = _block_hashes(self.token_ids, block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of the replay.

    Attributes:
        index: position in the workload.
        session: whose it is; ``parent`` is the session that spawned that one.
        context: its content; the input is a prefix of ``context.token_ids`` and the
            output continues it.
        wait_for: turns that must have ended first.
        follows_start_of: a turn that must have started first, for overlapping calls.
        gap_s: pause after that.
        next: what follows it, as far as an agents' harness can know.
    """

    index: int
    session: str
    parent: str | None = None
    input_tokens: int
    output_tokens: int
    context: Context
    wait_for: tuple[int, ...] = ()
    follows_start_of: int | None = None
    gap_s: float
    next: Next = Next.TOOL

    @property
    def num_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    turns: Sequence[Turn]
    block_size: int


def agents(rows: Sequence[TraceRow], *, block_size: int) -> Workload:
    """Coding agents with their sub-agents, closed loop."""
    plan = build_workload(
        rows,
        num_rows=len(rows),
        token_divisor=1,
        gap_divisor=1.0,
        vocab_size=VOCAB_SIZE,
    )
    return of_plan(plan, block_size=block_size)


def of_plan(plan: Plan, *, block_size: int) -> Workload:
    """What live servers are asked, with content of its own."""
    contexts: dict[str, Context] = {}
    turns = []
    for turn in plan.turns:
        context = contexts.setdefault(turn.stream, Context(turn.stream))
        if turn.parent and turn.stream == turn.session:
            context.shared = f"shared by {turn.parent}"
            context.num_shared = plan.shared_tokens
        turns.append(
            Turn(
                index=turn.index,
                session=turn.session,
                parent=turn.parent,
                input_tokens=turn.num_prompt_tokens,
                output_tokens=turn.num_output_tokens,
                context=context,
                wait_for=turn.wait_for,
                follows_start_of=turn.follows_start_of,
                gap_s=turn.gap_s,
                next=turn.next,
            )
        )
    return fill(turns, block_size)


def fill(turns: Sequence[Turn], block_size: int) -> Workload:
    """Gives every context its tokens."""
    init_none_hash(sha256)
    for turn in turns:
        turn.context.num_tokens = max(turn.context.num_tokens, turn.num_tokens)
    for context in {id(turn.context): turn.context for turn in turns}.values():
        context.fill(block_size)
    return Workload(turns=turns, block_size=block_size)


def jittered(workload: Workload, seed: int, *, max_shift_s: float = 30.0) -> Workload:
    """The same agents, each that waits for nobody started up to ``max_shift_s`` later.

    One closed-loop run is one draw: a request that slips by a millisecond can change
    who waits for whom. Several show what is policy and what is luck.
    """
    rng = random.Random(seed)
    first_of_session = {turn.session: turn.index for turn in reversed(workload.turns)}
    turns = [
        replace(turn, gap_s=turn.gap_s + rng.uniform(0.0, max_shift_s))
        if turn.parent is None and first_of_session[turn.session] == turn.index
        else turn
        for turn in workload.turns
    ]
    return replace(workload, turns=turns)


def _random_tokens(seed: str, count: int) -> list[int]:
    # A seeded string, not hash(): the content must not change between processes.
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def _block_hashes(token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    parent: BlockHash | None = None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        parent = hash_block_tokens(sha256, parent, block, None)
        hashes.append(parent)
    return hashes
