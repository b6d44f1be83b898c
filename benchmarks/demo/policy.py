"""What the demo's agent harness tells the server, and when.

Only what a harness really knows is used. Before a request it knows which agent it
is for; when the answer is there it knows whether a tool now runs, whether children
were spawned, or whether the agent has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def after_turn(turn: Turn, run: str) -> ControlCall | None:
    """What to tell the server once the answer shows what follows.

    An ended agent's context is dead: evict it. An agent that waits for its children
    stands still for as long as they work: give its lease back, so that theirs hold.
    """
    path = f"/v1/agent/sessions/{session_id(turn.session, run)}"
    if turn.next is Next.END:
        edits: dict[str, object] = {"edits": [{"type": "evict"}]}
        return ControlCall(method="POST", path=f"{path}/edits", body=edits)
    if turn.next is Next.CHILDREN:
        return ControlCall(method="PUT", path=f"{path}/lease", body={"ttl": 0})
    return None
