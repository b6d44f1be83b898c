"""Turns the recorded trace into a closed loop of requests with token ids.

The trace holds sizes and times only. Three things are derived from it:

*Order.* A turn starts when everything it waited for in the recording has ended:
the earlier turns of its agent, the children of its agent, and for a child's first
turn its parent's. It then pauses for the recorded gap. A new task starts after the
task whose end preceded it, because the recording system ran a fixed number of tasks.
Turns that overlapped an earlier turn of their agent follow its start instead.

*Content.* An agent's prompts are growing prefixes of one random stream of its own.
Sub-agents of one task share their first 8,000 recorded tokens. Side calls, which
interrupt an agent's context and do not extend it, get tokens of their own. What the
agent "said" is taken from the same stream and not from what the server generated,
so that all servers receive identical prompts whatever they generate.

*What the harness knows* after each turn: a tool runs, children were spawned and the
agent waits for them, the agent has ended, or the call was a side call.
"""

from __future__ import annotations

import enum
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import TRACES_DIR

TRACE = TRACES_DIR / "coding_agents.jsonl"
SHARED_PREFIX_TOKENS = 8000
FIRST_PLAIN_TOKEN = 8
_SIDE_CALL_FRACTION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    session: str
    parent: str | None
    start_s: float
    end_s: float
    input_tokens: int
    output_tokens: int

    @property
    def task(self) -> str:
        return self.session.partition("/")[0]


class Next(enum.Enum):
    """What follows a turn, as far as the agent's harness can know."""

    TOOL = "tool"
    CHILDREN = "children"
    END = "end"
    SIDE_CALL = "side_call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of the replay.

    Attributes:
        wait_for: turns that must have ended first.
        follows_start_of: turn that must have started first, for overlapping calls.
        gap_s: pause after that, already scaled.
        seen_tokens: length of the longest prefix of this prompt that an earlier
            prompt held; computing any of it again is avoidable work.
        next: what follows it.
    """

    index: int
    session: str
    parent: str | None
    stream: str
    num_prompt_tokens: int
    num_output_tokens: int
    wait_for: tuple[int, ...]
    follows_start_of: int | None
    gap_s: float
    next: Next
    seen_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    turns: tuple[Turn, ...]
    peak_live_tokens: int
    shared_tokens: int
    vocab_size: int

    def prompt(self, turn: Turn) -> list[int]:
        """Token ids of one turn; equal prefixes wherever content is shared."""
        shared = self.shared_tokens if turn.parent and "#" not in turn.stream else 0
        task = turn.session.partition("/")[0]
        head = self._tokens(f"{task}/shared", min(shared, turn.num_prompt_tokens))
        return head + self._tokens(turn.stream, turn.num_prompt_tokens - len(head))

    def _tokens(self, stream: str, count: int) -> list[int]:
        seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8])
        draw = random.Random(seed).randrange
        return [draw(FIRST_PLAIN_TOKEN, self.vocab_size) for _ in range(count)]


def load_trace(path: Path = TRACE) -> list[TraceRow]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [TraceRow(**json.loads(line)) for line in lines]


def build_workload(
    trace: Sequence[TraceRow],
    *,
    num_rows: int,
    token_divisor: int,
    gap_divisor: float,
    vocab_size: int,
    output_divisor: int | None = None,
) -> Workload:
    """Plan the first ``num_rows`` of ``trace``, scaled down.

    The whole trace is needed to know which agents end within those rows.

    Args:
        token_divisor: of prompts, and of outputs unless those have their own.
    """
    rows = trace[:num_rows]
    side = _side_calls(rows)
    last_index = {row.session: i for i, row in enumerate(trace)}
    shared = SHARED_PREFIX_TOKENS // token_divisor
    turns = []
    for i, row in enumerate(rows):
        wait_for, follows, anchor_s = _order(rows, last_index, i)
        turns.append(
            Turn(
                index=i,
                session=row.session,
                parent=row.parent,
                stream=f"{row.session}#{i}" if i in side else row.session,
                num_prompt_tokens=row.input_tokens // token_divisor,
                num_output_tokens=max(
                    1, row.output_tokens // (output_divisor or token_divisor)
                ),
                wait_for=wait_for,
                follows_start_of=follows,
                gap_s=(row.start_s - anchor_s) / gap_divisor,
                next=_next(trace, side, last_index, i),
                seen_tokens=_seen(rows, side, i, shared * token_divisor)
                // token_divisor,
            )
        )
    return Workload(
        turns=tuple(turns),
        peak_live_tokens=peak_live_tokens(rows, side) // token_divisor,
        shared_tokens=shared,
        vocab_size=vocab_size,
    )


def peak_live_tokens(rows: Sequence[TraceRow], side: frozenset[int]) -> int:
    """Most context alive at once: every agent between its first start and last end
    counts with its largest context so far, shared prefixes counted each time."""
    ends = {row.session: row.end_s for row in rows}
    for row in rows:
        ends[row.session] = max(ends[row.session], row.end_s)
    best = 0
    for moment in sorted({row.start_s for row in rows}):
        largest: dict[str, int] = {}
        for i, row in enumerate(rows):
            if i not in side and row.start_s <= moment <= ends[row.session]:
                known = largest.get(row.session, 0)
                largest[row.session] = max(known, row.input_tokens)
        best = max(best, sum(largest.values()))
    return best


def _side_calls(rows: Sequence[TraceRow]) -> frozenset[int]:
    """Calls beside an agent's context: the smaller of two overlapping ones, and any
    that is under half of the context it interrupts."""
    side: set[int] = set()
    largest: dict[str, int] = {}
    for i, row in enumerate(rows):
        overlapping = [
            j
            for j, other in enumerate(rows[:i])
            if other.session == row.session and other.end_s > row.start_s
        ]
        for j in overlapping:
            side.add(j if rows[j].input_tokens <= row.input_tokens else i)
        if row.input_tokens < _SIDE_CALL_FRACTION * largest.get(row.session, 0):
            side.add(i)
        if i not in side:
            known = largest.get(row.session, 0)
            largest[row.session] = max(known, row.input_tokens)
    return frozenset(side)


def _order(
    rows: Sequence[TraceRow], last_index: dict[str, int], i: int
) -> tuple[tuple[int, ...], int | None, float]:
    """What turn ``i`` waits for, and the recorded moment its gap counts from."""
    row = rows[i]
    earlier = range(i)
    own = [j for j in earlier if rows[j].session == row.session]
    related = [*own, *(j for j in earlier if rows[j].parent == row.session)]
    if not own and row.parent:
        related += [j for j in earlier if rows[j].session == row.parent]
    if not own and not row.parent:
        leads = (j for j in earlier if rows[j].parent is None)
        related += [j for j in leads if j == last_index[rows[j].session]]
    ended = tuple(j for j in related if rows[j].end_s <= row.start_s)
    if ended:
        return ended, None, max(rows[j].end_s for j in ended)
    if own:
        return (), own[-1], rows[own[-1]].start_s
    return (), None, 0.0


def _next(
    trace: Sequence[TraceRow], side: frozenset[int], last_index: dict[str, int], i: int
) -> Next:
    row = trace[i]
    if i in side:
        return Next.SIDE_CALL
    if i == last_index[row.session]:
        return Next.END
    later = (r for r in trace[i + 1 :] if r.session == row.session)
    resumes_s = min(r.start_s for r in later)
    spawned = any(
        r.parent == row.session and row.end_s <= r.start_s < resumes_s for r in trace
    )
    return Next.CHILDREN if spawned else Next.TOOL


def _seen(
    rows: Sequence[TraceRow], side: frozenset[int], i: int, shared_tokens: int
) -> int:
    """Recorded tokens of turn ``i`` that a finished earlier prompt already held."""
    row = rows[i]
    if i in side:
        return 0
    seen = 0
    for j, other in enumerate(rows[:i]):
        if j in side or other.end_s > row.start_s:
            continue
        if other.session == row.session:
            seen = max(seen, other.input_tokens)
        elif row.parent and other.parent == row.parent:
            seen = max(seen, min(shared_tokens, other.input_tokens))
    return min(seen, row.input_tokens)
