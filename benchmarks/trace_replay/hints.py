"""What agents' harnesses say about their sessions, and when.

A harness knows its own plans, never the future: which agent a request is for, whether
a tool now runs, children were spawned or the agent has ended, and that the last child
an agent waits for has ended. ``benchmarks.demo.policy`` says the same over HTTP.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.demo.policy import resumptions
from benchmarks.demo.workload import Next
from benchmarks.trace_replay.workload import Turn, Workload
from sam_connector.core.types import EditType

_MAX_TTL_S = 3_600.0


class Call(NamedTuple):
    """A control call: an edit, or a new lease if ``edit`` is ``None``."""

    session: str
    edit: EditType | None
    ttl_s: float = 0.0
    expected_resume_s: float | None = None
    block_start: int | None = None
    block_end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRules:
    """What is said.

    Attributes:
        tool_ttl_s: retention asked for with every request, since a tool will run
            and the agent will be back; ``None`` asks for nothing.
        wait_ttl_s: retention of an agent that has just spawned others and waits
            for them; ``None`` leaves it as any other turn.
        evict_at_end: evict the context of an agent that has finished.
        keep_template: of a sub-agent's context keep what its harness has begun it
            with, since the next one begins so, until its parent has finished.
        offload_waiting: offload an agent that waits for others, and prefetch it when
            the last of them has ended.
        name_side_calls: whether a one-off call, such as one for a title, names the
            session; if not, it is no part of any and carries no hint.
        expect_resume: say when the agent will probably be back: after as long as its
            tools have taken so far on average, or as the children of earlier agents
            have.
        wrong_share: of the sessions so many, chosen by lot, send random leases, evict
            themselves while they go on, and prefetch the dead.
    """

    tool_ttl_s: float | None = 60.0
    wait_ttl_s: float | None = 0.0
    evict_at_end: bool = True
    keep_template: bool = True
    offload_waiting: bool = False
    name_side_calls: bool = False
    expect_resume: bool = False
    wrong_share: float = 0.0

    @classmethod
    def session_ids(cls) -> HintRules:
        """Sessions are named, and nothing is said of them."""
        return cls(
            tool_ttl_s=None,
            wait_ttl_s=None,
            evict_at_end=False,
        )


class Harness:
    """Speaks for all agents of a workload.

    Attributes:
        wrong: the sessions whose hints are wrong.
    """

    def __init__(self, rules: HintRules, workload: Workload) -> None:
        self._rules = rules
        self._resuming = resumptions(workload.turns)
        self._rng = random.Random("wrong hints")
        self.wrong = wrong_sessions(workload, rules.wrong_share)
        self._dead: list[str] = []
        self._block_size = workload.block_size
        self._children: dict[str, list[str]] = {}
        self._tools = Pauses(default_s=5.0)
        self._waits = Pauses(default_s=120.0)

    def hint(self, turn: Turn) -> dict[str, Any] | None:
        """``agent_hint`` of a request."""
        rules = self._rules
        if turn.next is Next.SIDE_CALL and not rules.name_side_calls:
            return None
        hint: dict[str, Any] = {"session_id": turn.session}
        if turn.parent is not None:
            hint["parent_session_id"] = turn.parent
        ttl_s = rules.tool_ttl_s
        if turn.session in self.wrong:
            ttl_s = self._rng.uniform(0.0, _MAX_TTL_S)
        if ttl_s is not None:
            hint["cache_control"] = {"ttl": ttl_s}
        if rules.expect_resume:
            hint["expected_resume_s"] = self._tools.expected_s(turn.session)
        return hint

    def on_arrival(self, turn: Turn, now_s: float) -> None:
        """The agent is back."""
        if turn.next is not Next.SIDE_CALL:
            self._tools.end(turn.session, now_s)
            self._waits.end(turn.session, now_s)

    def on_ready(self, turn: Turn) -> Iterable[Call]:
        """All that the turn waits for has ended; its own pause comes next."""
        if turn.session in self.wrong:
            if self._dead:
                yield Call(self._rng.choice(self._dead), EditType.PREFETCH)
        elif self._rules.offload_waiting and turn.index in self._resuming:
            yield Call(turn.session, EditType.PREFETCH)

    def on_answer(self, turn: Turn, now_s: float) -> Iterable[Call]:
        """The answer is there and shows what follows."""
        rules = self._rules
        if turn.next is Next.END:
            self._dead.append(turn.session)
        elif turn.next is Next.TOOL:
            self._tools.begin(turn.session, now_s)
        elif turn.next is Next.CHILDREN:
            self._waits.begin(turn.session, now_s)
        if turn.session in self.wrong:
            if self._rng.random() < 0.5:
                yield Call(turn.session, EditType.EVICT)
        elif turn.next is Next.END:
            if rules.evict_at_end:
                yield from self._end(turn)
        elif turn.next is Next.CHILDREN:
            if rules.wait_ttl_s is not None:
                expected_s = None
                if rules.expect_resume:
                    expected_s = self._waits.expected_s(turn.session)
                yield Call(turn.session, None, rules.wait_ttl_s, expected_s)
            if rules.offload_waiting:
                yield Call(turn.session, EditType.OFFLOAD)

    def _end(self, turn: Turn) -> Iterable[Call]:
        """The agent has finished, and is the last to use its context."""
        for child in self._children.pop(turn.session, ()):
            yield Call(child, EditType.EVICT)
        template = turn.context.num_shared // self._block_size
        if turn.parent is None or not (template and self._rules.keep_template):
            yield Call(turn.session, EditType.EVICT)
            return
        # The last token has no KV.
        num_blocks = (turn.num_tokens - 1) // self._block_size
        yield Call(
            turn.session, EditType.EVICT, block_start=template, block_end=num_blocks
        )
        yield Call(turn.session, None, 0.0)
        self._children.setdefault(turn.parent, []).append(turn.session)


class Pauses:
    """How long pauses of one kind have taken so far.

    Args:
        default_s: what is said before there was any.
    """

    def __init__(self, *, default_s: float) -> None:
        self._default_s = default_s
        self._begun: dict[str, float] = {}
        self._of: dict[str, list[float]] = {}
        self._all: list[float] = []

    def begin(self, session: str, now_s: float) -> None:
        self._begun[session] = now_s

    def end(self, session: str, now_s: float) -> None:
        begun_s = self._begun.pop(session, None)
        if begun_s is not None:
            self._of.setdefault(session, []).append(now_s - begun_s)
            self._all.append(now_s - begun_s)

    def expected_s(self, session: str) -> float:
        """The mean of the agent's own, of everybody's if it had none."""
        known = self._of.get(session) or self._all or [self._default_s]
        return min(_MAX_TTL_S, statistics.fmean(known))


def wrong_sessions(workload: Workload, share: float) -> frozenset[str]:
    """The sessions that are wrong about themselves."""
    names = sorted({turn.session for turn in workload.turns})
    chosen = random.Random("which are wrong").sample(names, round(share * len(names)))
    return frozenset(chosen)
