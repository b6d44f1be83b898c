"""From a recorded trace to turns with content, causes and gaps.

The trace holds lengths and times only, so what a request contains is inferred:

* A request extends the longest context of its session that had ended when it
  started and whose previous input is no longer than its own; the previous input
  and output are then its prefix as far as lengths allow.
* Any other request of the session is a side call and gets content of its own.
* Sub-agents of one lead share their first :data:`SHARED_PREFIX_TOKENS` tokens.

What a request waits for is inferred too, so that the loop is closed: the session's
previous request ended (or began, if the two overlapped) a recorded gap before; a
sub-agent's first request follows the request of its lead that spawned it; only a
lead's first request has an absolute time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    hash_block_tokens,
    init_none_hash,
)

SHARED_PREFIX_TOKENS = 8_000
VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded request; times in seconds from the start of the trace."""

    session: str
    parent: str | None
    start_s: float
    end_s: float
    input_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Context:
    """Content that only grows; one token array serves every request that uses it.

    Attributes:
        token_ids: the longest content reached.
        block_hashes: vLLM's chained hashes of its full blocks.
    """

    num_tokens: int = 0
    shared: str | None = None
    block_size: int = 0
    token_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of the replay.

    Attributes:
        index: position in the trace.
        context: its content; the input is a prefix of ``context.token_ids`` and the
            output continues it.
        after: index of the turn it waits for; ``None`` starts at ``offset_s``.
        after_start: it waits for that turn's arrival instead of its end.
        offset_s: seconds from the awaited moment.
        num_children: sub-agents whose first request waits for this turn.
        ends_session: no later request belongs to this session.
        ends_task: no later request belongs to this lead or its sub-agents.
        is_side_call: opened a context besides the session's main one.
    """

    index: int
    session: str
    parent: str | None
    input_tokens: int
    output_tokens: int
    context: Context
    after: int | None
    after_start: bool
    offset_s: float
    num_children: int
    ends_session: bool
    ends_task: bool
    is_side_call: bool

    @property
    def task(self) -> str:
        """The lead that this request works for, itself included."""
        return self.parent or self.session

    @property
    def num_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    turns: Sequence[Turn]
    block_size: int

    def followers(self) -> dict[int, list[Turn]]:
        """Turns that wait for a turn, by its index."""
        waiting: dict[int, list[Turn]] = {}
        for turn in self.turns:
            if turn.after is not None:
                waiting.setdefault(turn.after, []).append(turn)
        return waiting


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a JSON-lines trace, sorted by start time."""
    with path.open(encoding="utf-8") as lines:
        rows = [TraceRow(**json.loads(line)) for line in lines if line.strip()]
    return sorted(rows, key=lambda row: row.start_s)


def build_workload(rows: Sequence[TraceRow], *, block_size: int) -> Workload:
    """Infers content and causes, and hashes the content as vLLM does."""
    contexts = _assign_contexts(rows)
    causes = [_cause(rows, index) for index in range(len(rows))]
    children: dict[int, int] = {}
    for index, (after, _, _) in enumerate(causes):
        if after is not None and rows[after].session != rows[index].session:
            children[after] = children.get(after, 0) + 1
    last_of_session = {row.session: i for i, row in enumerate(rows)}
    last_of_task = {row.parent or row.session: i for i, row in enumerate(rows)}
    turns = [
        Turn(
            index=index,
            session=row.session,
            parent=row.parent,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            context=contexts[index],
            after=after,
            after_start=after_start,
            offset_s=offset_s,
            num_children=children.get(index, 0),
            ends_session=last_of_session[row.session] == index,
            ends_task=last_of_task[row.parent or row.session] == index,
            is_side_call=_is_side_call(contexts, rows, index),
        )
        for index, (row, (after, after_start, offset_s)) in enumerate(
            zip(rows, causes, strict=True)
        )
    ]
    _fill_contexts(contexts, block_size)
    return Workload(turns=turns, block_size=block_size)


def _assign_contexts(rows: Sequence[TraceRow]) -> list[Context]:
    """Gives each request the context it extends, or a new one."""
    assigned: list[Context] = []
    open_contexts: dict[str, list[tuple[TraceRow, Context]]] = {}
    for row in rows:
        known = open_contexts.setdefault(row.session, [])
        usable = [
            (previous, context)
            for previous, context in known
            if previous.end_s <= row.start_s
            and previous.input_tokens <= row.input_tokens
        ]
        if usable:
            entry = max(usable, key=lambda pair: pair[0].input_tokens)
            known.remove(entry)
            context = entry[1]
        else:
            context = Context(shared=row.parent)
        context.num_tokens = max(
            context.num_tokens, row.input_tokens + row.output_tokens
        )
        known.append((row, context))
        assigned.append(context)
    return assigned


def _is_side_call(
    contexts: Sequence[Context], rows: Sequence[TraceRow], index: int
) -> bool:
    """Whether the request's context is not the longest of its session."""
    mine = contexts[index]
    return any(
        row.session == rows[index].session and context.num_tokens > mine.num_tokens
        for row, context in zip(rows, contexts, strict=True)
    )


def _cause(rows: Sequence[TraceRow], index: int) -> tuple[int | None, bool, float]:
    """Returns ``(after, after_start, offset_s)`` of a request."""
    row = rows[index]
    previous = _latest(i for i in range(index) if rows[i].session == row.session)
    if previous is not None:
        gap_s = row.start_s - rows[previous].end_s
        if gap_s >= 0:
            return previous, False, gap_s
        return previous, True, row.start_s - rows[previous].start_s
    spawner = _latest(
        i
        for i in range(index)
        if rows[i].session == row.parent and rows[i].end_s <= row.start_s
    )
    if spawner is not None:
        return spawner, False, row.start_s - rows[spawner].end_s
    return None, False, row.start_s


def _latest(indices: Iterator[int]) -> int | None:
    return max(indices, default=None)


def _fill_contexts(contexts: Iterable[Context], block_size: int) -> None:
    init_none_hash(sha256)
    unique = list({id(context): context for context in contexts}.values())
    for number, context in enumerate(unique):
        context.block_size = block_size
        context.token_ids = _token_ids(context, number)
        context.block_hashes = _block_hashes(context.token_ids, block_size)


def _token_ids(context: Context, number: int) -> list[int]:
    shared: list[int] = []
    if context.shared is not None:
        num_shared = min(SHARED_PREFIX_TOKENS, context.num_tokens)
        shared = _random_tokens(f"task {context.shared}", num_shared)
    own = context.num_tokens - len(shared)
    return shared + _random_tokens(f"context {number}", own)


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
