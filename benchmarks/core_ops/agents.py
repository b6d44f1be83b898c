"""What a block pool asks of its free queue while agents take turns.

The turns are played once on a queue of ours, which says what is handed out and hence
what is left for the next hit; what was asked of the queue is recorded and asked again
of the queues that are measured.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sam_connector.core.claim import Claim
from sam_connector.core.types import Zone
from sam_connector.core.zoned_queue import ZonedFreeQueue

#: Requests that run at the same time.
NUM_RUNNING = 8
#: Sizes in blocks of 16 tokens: those of a coding agent, as in ``no_hint_overhead``.
FIRST_PROMPT = (60, 400)
NEW_INPUT = (3, 90)
OUTPUT = (3, 25)
LONGEST = 500
#: Blocks that are prefilled in one step, and hence allocated together.
CHUNK = 512
#: Contexts in all, as a multiple of what the pool can hold.
DEMAND = 1.25
#: Of ten turns, how many end under a lease. The rest is held without.
LEASED_OF_TEN = 6

Call = tuple[str, Any]
Bound = tuple[Callable[[Any], object], Any]


class Block:
    """A block as the queues see it."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


@dataclass(slots=True)
class Script:
    """Calls in their order, in stretches of queue calls and of claim calls by turns.

    Blocks are ids, claims are numbers.
    """

    stretches: list[tuple[bool, list[Call]]] = field(default_factory=list)
    num_blocks: int = 0

    def add(self, name: str, argument: Any, *, is_claim: bool = False) -> None:
        if not self.stretches or self.stretches[-1][0] is not is_claim:
            self.stretches.append((is_claim, []))
        self.stretches[-1][1].append((name, argument))


@dataclass(slots=True)
class _Agent:
    """Whoever takes turns.

    Attributes:
        length: of its context, in whole blocks.
        chain: the blocks that its next request would hit, in their order.
        claim: on the blocks of its context.
        num_held: how many there were at the end of its last turn.
    """

    length: int
    chain: list[int] = field(default_factory=list)
    claim: int | None = None
    num_held: int = 0


class Agents:
    """Agents that take turns on one pool, in an order that is drawn by lot.

    Args:
        num_blocks: of the pool, ids 1 and up.
        claimed: whether contexts are held and leased once a turn has ended.
        seed: of sizes and order.
    """

    def __init__(self, num_blocks: int, *, claimed: bool, seed: int = 0) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks + 1)]
        self._queue = ZonedFreeQueue(self._blocks[1:], num_blocks + 1)
        self._rng = random.Random(seed)
        self._claimed = claimed
        self._claims: dict[int, Claim] = {}
        self._numbers = itertools.count()
        self._now = 0.0
        self._script = Script()
        self._owner: list[tuple[_Agent, int] | None] = [None] * (num_blocks + 1)
        mean = (FIRST_PROMPT[0] + LONGEST) / 2
        self._agents = [
            self._begin()
            for _ in range(max(NUM_RUNNING, int(DEMAND * num_blocks / mean)))
        ]

    def play(self, num_rounds: int) -> Script:
        """Eight requests a round, all of them at the same time."""
        self._script = Script()
        for _ in range(num_rounds):
            self._round(self._rng.sample(self._agents, NUM_RUNNING))
        return self._script

    def fill(self) -> Script:
        """Every agent takes a turn, after which the pool has no unused block."""
        self._script = Script()
        for start in range(0, len(self._agents), NUM_RUNNING):
            self._round(self._agents[start : start + NUM_RUNNING])
        return self._script

    def check_integrity(self) -> None:
        self._queue.check_integrity()

    # --- the turns ----------------------------------------------------------------

    def _begin(self) -> _Agent:
        return _Agent(self._rng.randint(*FIRST_PROMPT))

    def _round(self, agents: Sequence[_Agent]) -> None:
        self._now += 1.0
        held = [self._admit(agent) for agent in agents]
        left = [self._rng.randint(*OUTPUT) for _ in agents]
        while any(left):
            for index, agent in enumerate(agents):
                if left[index]:
                    held[index] += self._pop(1)
                    left[index] -= 1
                    if not left[index]:
                        self._finish(agent, held[index])

    def _admit(self, agent: _Agent) -> list[int]:
        held = agent.chain
        for block_id in held:
            self._queue.remove(self._blocks[block_id])
            self._script.add("remove", block_id)
        self._script.num_blocks += len(held)
        wanted = agent.length + self._rng.randint(*NEW_INPUT)
        while len(held) < wanted:
            held = held + self._pop(min(CHUNK, wanted - len(held)))
        return held

    def _pop(self, count: int) -> list[int]:
        popped = [block.block_id for block in self._queue.popleft_n(count)]
        self._script.add("popleft_n", count)
        self._script.num_blocks += count
        for block_id in popped:
            owner = self._owner[block_id]
            if owner is not None:
                agent, position = owner
                # A hit ends at the first block that is missing.
                del agent.chain[position:]
                self._owner[block_id] = None
        return popped

    def _finish(self, agent: _Agent, held: list[int]) -> None:
        # The last block is not full: it has no hash and is of no use to anybody.
        whole, last = held[:-1], held[-1]
        num_hit = len(agent.chain)
        for block_id in agent.chain:
            self._owner[block_id] = None
        agent.chain, agent.length = whole, len(whole)
        for position, block_id in enumerate(whole):
            self._owner[block_id] = (agent, position)
        if self._claimed:
            self._hold(agent, num_hit)
        self._queue.prepend_n([self._blocks[last]])
        self._script.add("prepend_n", (last,))
        freed = tuple(reversed(whole))
        self._queue.append_n([self._blocks[block_id] for block_id in freed])
        self._script.add("append_n", freed)
        self._script.num_blocks += len(held)
        if agent.length > LONGEST:
            self._leave(agent)

    def _hold(self, agent: _Agent, num_hit: int) -> None:
        """What the session-aware manager does once a request has completed."""
        is_leased = self._rng.randrange(10) < LEASED_OF_TEN
        zone, deadline = (Zone.C, self._now + 60.0) if is_leased else (Zone.B, 0.0)
        if agent.claim is None or num_hit < agent.num_held:
            # What is left behind the gap is nobody's now.
            self._end_claim(agent)
            num_hit, agent.claim = 0, next(self._numbers)
            self._claims[agent.claim] = self._queue.open_claim(agent, zone, deadline)
            self._script.add("open_claim", agent.claim, is_claim=True)
        claim = self._claims[agent.claim]
        agent.num_held = len(agent.chain)
        added = tuple(reversed(agent.chain[num_hit:]))
        self._queue.claim_all([self._blocks[i] for i in added], claim)
        self._script.add("claim_all", (agent.claim, added), is_claim=True)
        self._queue.move_claim(claim, zone, deadline)
        self._script.add("move_claim", (agent.claim, zone, deadline), is_claim=True)

    def _end_claim(self, agent: _Agent) -> None:
        if agent.claim is not None:
            self._queue.end_claim(self._claims.pop(agent.claim))
            self._script.add("end_claim", agent.claim, is_claim=True)
            agent.claim = None

    def _leave(self, agent: _Agent) -> None:
        """The agent has done its work; another takes its place."""
        self._end_claim(agent)
        for block_id in agent.chain:
            self._owner[block_id] = None
        new = self._begin()
        agent.length, agent.chain = new.length, []


class Replay:
    """A queue that is asked what a script says.

    Args:
        queue: stock's or ours.
        blocks: the pool's, by id.
    """

    def __init__(self, queue: Any, blocks: Sequence[Any]) -> None:
        self.queue = queue
        self._blocks = blocks
        self._claims: dict[int, Claim] = {}

    def prepare(self, script: Script) -> list[tuple[bool, list[Bound]]]:
        """The stretches, with everything looked up that need not be on the clock."""
        return [
            (is_claim, [b for name, arg in calls for b in self._bind(name, arg)])
            for is_claim, calls in script.stretches
        ]

    def _bind(self, name: str, argument: Any) -> Iterator[Bound]:
        queue, blocks = self.queue, self._blocks
        match name:
            case "popleft_n":
                yield queue.popleft_n, argument
            case "remove":
                yield queue.remove, blocks[argument]
            case "append_n" | "prepend_n":
                yield getattr(queue, name), [blocks[i] for i in argument]
            case "open_claim":
                # It has no blocks yet, so that it may as well be opened beforehand.
                self._claims[argument] = queue.open_claim(None, Zone.B)
            case "claim_all":
                claimed = [blocks[i] for i in argument[1]]
                yield partial(queue.claim_all, claimed), self._claims[argument[0]]
            case "move_claim":
                number, zone, deadline = argument
                yield partial(queue.move_claim, self._claims[number], zone), deadline
            case "end_claim":
                yield queue.end_claim, self._claims.pop(argument)
