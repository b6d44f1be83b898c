"""What the demo's agent harness tells the server, and when.

Only what a harness really knows is used. Before a request it knows which agent it
is for; when the answer is there it knows whether a tool now runs, whether children
were spawned, or whether the agent has ended; and it knows when the last child that
an agent waits for has ended, since it is the one who tells the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.demo.workload import Next, Turn

#: A tool call of a coding agent ends within seconds; the rest is time in the queue.
TOOL_LEASE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """One call of the control routes."""

    method: str
    path: str
    body: dict[str, object] | None = None


def session_id(name: str, run: str) -> str:
    """Id on the wire; ``run`` keeps two passes over one server apart."""
    return f"{run}:{name.replace('/', ':')}"


def request_hint(turn: Turn, run: str) -> dict[str, object] | None:
    """``agent_hint`` of a request: expect a tool call next, as nearly always.

    A one-off call, say for a title, is worth nothing afterwards: it names no session
    and its blocks stay ordinary.
    """
    if turn.next is Next.SIDE_CALL:
        return None
    hint: dict[str, object] = {
        "session_id": session_id(turn.session, run),
        "cache_control": {"type": "ephemeral", "ttl": TOOL_LEASE_S},
    }
    if turn.parent is not None:
        hint["parent_session_id"] = session_id(turn.parent, run)
    return hint


def after_turn(turn: Turn, run: str) -> tuple[ControlCall, ...]:
    """What to tell the server, in this order, once the answer shows what follows.

    An ended agent's context is dead: evict it. An agent that waits for its children
    stands still for as long as they work: end its lease, which an edit leaves as it
    is, and offload it, so that the children have the GPU's memory.
    """
    if turn.next is Next.END:
        return (edit(turn.session, run, "evict"),)
    if turn.next is Next.CHILDREN:
        return (lease(turn.session, run, 0), edit(turn.session, run, "offload"))
    return ()


def before_resuming(turn: Turn, run: str) -> ControlCall:
    """What to tell the server once the last child has ended that ``turn`` waits for."""
    return edit(turn.session, run, "prefetch")


class Caused(Protocol):
    """A turn as far as it follows from others."""

    @property
    def index(self) -> int: ...
    @property
    def session(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def wait_for(self) -> tuple[int, ...]: ...
    @property
    def next(self) -> Next: ...


def resumptions(turns: Sequence[Caused]) -> dict[int, int]:
    """Turns with which an agent resumes after its children, each with the turn after
    which it had begun to wait; both as indices into ``turns``, a whole workload."""
    found: dict[int, int] = {}
    waiting: dict[str, int] = {}
    for turn in turns:
        if turn.next is Next.SIDE_CALL:
            continue
        since = waiting.pop(turn.session, None)
        if since is not None and any(
            i > since and turns[i].parent == turn.session for i in turn.wait_for
        ):
            found[turn.index] = since
        if turn.next is Next.CHILDREN:
            waiting[turn.session] = turn.index
    return found


def lease(session: str, run: str, ttl_s: float) -> ControlCall:
    """Retain what the session has for so long from now."""
    path = f"{_path(session, run)}/lease"
    return ControlCall(method="PUT", path=path, body={"ttl": ttl_s})


def edit(session: str, run: str, kind: str) -> ControlCall:
    """One edit of all that the session has."""
    body: dict[str, object] = {"edits": [{"type": kind}]}
    return ControlCall(method="POST", path=f"{_path(session, run)}/edits", body=body)


class AgentPolicy:
    """All of the above for one pass over a workload.

    Args:
        turns: of the whole workload.
        run: name of the pass.
    """

    def __init__(self, turns: Sequence[Turn], run: str) -> None:
        self._run = run
        self._resuming = resumptions(turns)

    def hint(self, turn: Turn) -> dict[str, object] | None:
        """``agent_hint`` of the turn's request."""
        return request_hint(turn, self._run)

    def before_turn(self, turn: Turn) -> tuple[ControlCall, ...]:
        """What to say once all that ``turn`` waits for has ended."""
        if turn.index not in self._resuming:
            return ()
        return (before_resuming(turn, self._run),)

    def after_turn(self, turn: Turn) -> tuple[ControlCall, ...]:
        """What to say once the answer is there and shows what follows."""
        return after_turn(turn, self._run)


def _path(session: str, run: str) -> str:
    return f"/v1/agent/sessions/{session_id(session, run)}"
