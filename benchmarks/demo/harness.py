"""The agents' harness: says what ``policy`` decides, and counts what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import httpx

from benchmarks.demo.client import ControlError, DemoClient
from benchmarks.demo.policy import AgentPolicy, ControlCall
from benchmarks.demo.workload import Turn

_DONE = frozenset({"done", "completed", "accepted", "partial"})


class Harness:
    """Speaks for all agents of one pass over the workload.

    A control call that fails is counted and never raised: agents go on without.

    Args:
        policy: what to say; ``None`` says nothing.

    Attributes:
        outcomes: number of calls by ``what/outcome``, as in ``offload/accepted``.
    """

    def __init__(self, client: DemoClient, policy: AgentPolicy | None) -> None:
        self._client = client
        self._policy = policy
        self.outcomes: Counter[str] = Counter()

    def hint(self, turn: Turn) -> dict[str, object] | None:
        return self._policy.hint(turn) if self._policy else None

    async def on_ready(self, turn: Turn) -> None:
        """All that ``turn`` waits for has ended; its own pause comes next."""
        if self._policy:
            for call in self._policy.before_turn(turn):
                await self._send(call)

    async def on_answer(self, turn: Turn) -> None:
        """The answer is there and shows what follows."""
        if self._policy:
            for call in self._policy.after_turn(turn):
                await self._send(call)

    async def _send(self, call: ControlCall) -> None:
        try:
            answer = await self._client.control(call)
        except ControlError as error:
            outcomes = [f"{_what(call)}/{error.status}"]
        except httpx.TransportError as error:
            outcomes = [f"{_what(call)}/{type(error).__name__}"]
        else:
            outcomes = _outcomes(call, answer)
        self.outcomes.update(outcomes)


def num_failed(outcomes: Mapping[str, int]) -> int:
    """Control calls that had no effect."""
    return sum(
        count
        for outcome, count in outcomes.items()
        if outcome.partition("/")[2] not in _DONE
    )


def _what(call: ControlCall) -> str:
    """``lease``, or the types of the edits."""
    edits = (call.body or {}).get("edits")
    if not isinstance(edits, list):
        return call.path.rpartition("/")[2]
    return "+".join(str(edit["type"]) for edit in edits)


def _outcomes(call: ControlCall, answer: object) -> list[str]:
    """An answer's results, one for each edit; a lease has none."""
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        return [f"{_what(call)}/done"]
    return [f"{result['type']}/{result['status']}" for result in results]
