"""The block index: a radix tree of contexts over resident blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.core_ops.engine_pool import GROUP, EnginePool
from benchmarks.core_ops.timing import Batch
from sam_connector.core.block_index import BlockIndex
from sam_connector.core.retention import Retention
from sam_connector.core.session_index import Context, Session
from sam_connector.core.types import BlockHash, BlockId, SessionKey

NUM_BLOCKS = 64
NUM_GROWTH = 8
NUM_OPS = 75

#: What a turn of a context costs in the index, from its match to its lease.
TURN = ("match", "grow", "renew", "shrink")


@dataclass(slots=True, kw_only=True)
class _Line:
    """One context and what it consists of."""

    context: Context
    hashes: list[BlockHash]
    block_ids: list[BlockId]


class IndexSubject:
    """Contexts of 64 resident blocks each, none of which is in use.

    Args:
        num_entries: blocks of all contexts together.
    """

    def __init__(self, num_entries: int) -> None:
        self._rng = random.Random(num_entries)
        spare = NUM_OPS * NUM_GROWTH
        self._pool = EnginePool(num_entries + spare)
        retention = Retention(
            self._pool.adapter,
            num_blocks=num_entries + spare + 1,
            max_protected=num_entries + spare,
        )
        self.index = BlockIndex(retention)
        self._lines = [
            self._new_line(number) for number in range(num_entries // NUM_BLOCKS)
        ]

    def batches(self) -> Iterator[Batch]:
        picked = self._rng.sample(self._lines, min(NUM_OPS, len(self._lines) // 2))
        grown = [self._grown(line) for line in picked]
        yield _batch("match", grown, self._match)
        yield _batch("grow", grown, self._grow)
        for line in grown:
            self._pool.give_back(line.block_ids[NUM_BLOCKS:])
        yield _batch("renew", picked, self._renew)
        yield _batch("shrink", picked, self._shrink)
        # A context that is nowhere resident, one that leaves it half way, both gone.
        fresh = [self._absent_line(number) for number in range(len(picked))]
        yield _batch("open", fresh, self._hold)
        forks = [self._fork(line) for line in fresh]
        yield _batch("split", forks, self._hold)
        yield _batch("forget", [*forks, *fresh], self._forget)

    def _new_line(self, number: int) -> _Line:
        hashes = self._pool.new_hashes(NUM_BLOCKS)
        line = _Line(
            context=_context(f"session-{number}"),
            hashes=hashes,
            block_ids=self._pool.take(hashes),
        )
        # Every second one under a lease of its own.
        self._hold(line, deadline=float(number) if number % 2 else 0.0)
        self._pool.give_back(line.block_ids)
        return line

    def _absent_line(self, number: int) -> _Line:
        hashes = self._pool.new_hashes(NUM_BLOCKS)
        return _Line(context=_context(f"new-{number}"), hashes=hashes, block_ids=[])

    def _fork(self, line: _Line) -> _Line:
        hashes = line.hashes[: NUM_BLOCKS // 2] + self._pool.new_hashes(NUM_GROWTH)
        return _Line(context=_context("fork"), hashes=hashes, block_ids=[])

    def _grown(self, line: _Line) -> _Line:
        added = self._pool.new_hashes(NUM_GROWTH)
        return _Line(
            context=line.context,
            hashes=line.hashes + added,
            block_ids=line.block_ids + self._pool.take(added),
        )

    def _match(self, line: _Line) -> None:
        if self.index.common_length(line.context, GROUP, line.hashes) != NUM_BLOCKS:
            raise RuntimeError("a context was not found whole")

    def _hold(self, line: _Line, deadline: float = 0.0) -> None:
        self.index.hold(
            line.context,
            GROUP,
            line.hashes,
            line.block_ids,
            len(line.hashes),
            deadline=deadline,
        )

    def _grow(self, line: _Line) -> None:
        self._hold(line, deadline=line.context.leaves[GROUP].expire_at)

    def _renew(self, line: _Line) -> None:
        deadline = line.context.leaves[GROUP].expire_at
        if deadline:
            self.index.set_deadline(line.context, GROUP, deadline + 1.0)

    def _shrink(self, line: _Line) -> None:
        self.index.release(line.context, GROUP, start=NUM_BLOCKS)

    def _forget(self, line: _Line) -> None:
        self.index.release(line.context, GROUP)


def _context(session_id: str) -> Context:
    session = Session(key=SessionKey("", session_id))
    context = Context(session=session)
    session.contexts.append(context)
    return context


def _batch(name: str, lines: list[_Line], call: Callable[[_Line], None]) -> Batch:
    return Batch(name=name, num_ops=len(lines), run=lambda: _each(call, lines))


def _each(call: Callable[[_Line], None], lines: Iterable[_Line]) -> None:
    for line in lines:
        call(line)
