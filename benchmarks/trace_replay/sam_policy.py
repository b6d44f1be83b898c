"""Our arms: the session-aware manager, with and without an agent harness's hints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.trace_replay.policies import Policy
from sam_connector.config import SamConfig
from sam_connector.core.clock import ManualClock
from sam_connector.core.types import Edit, EditType, SessionKey
from sam_connector.vllm_adapter.host import SamHost

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from benchmarks.trace_replay.workload import Turn, Workload

TENANT = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRules:
    """What an agent harness says; it knows its own plans, never the future.

    Attributes:
        tool_ttl_s: retention asked for with every request, since a tool will run
            and the agent will be back; ``None`` asks for nothing.
        wait_ttl_s: retention of a lead that has just spawned a sub-agent and waits
            for it; ``None`` leaves it as any other turn.
        evict_at_end: evict the context of an agent that has finished.
        name_side_calls: whether a one-off call, such as one for a title, names the
            session; if not, it is no part of any and carries no hint.
    """

    tool_ttl_s: float | None = 60.0
    wait_ttl_s: float | None = 0.0
    evict_at_end: bool = True
    name_side_calls: bool = False

    def hint_with(self, turn: Turn) -> dict[str, Any] | None:
        """The hint that goes with a request."""
        if turn.is_side_call and not self.name_side_calls:
            return None
        hint: dict[str, Any] = {"session_id": turn.session}
        if turn.parent is not None:
            hint["parent_session_id"] = turn.parent
        if self.tool_ttl_s is not None:
            hint["cache_control"] = {"ttl": self.tool_ttl_s}
        return hint

    def lease_after(self, turn: Turn) -> float | None:
        """A new retention once the answer is known, if it changes anything."""
        return self.wait_ttl_s if turn.num_children else None

    def edits_after(self, turn: Turn) -> list[Edit]:
        """Control calls once the answer is known."""
        if turn.ends_session and self.evict_at_end:
            return [Edit(type=EditType.EVICT)]
        return []


class SamPolicy(Policy):
    """Hosts SAM as the connector does, on virtual time.

    Args:
        rules: the hints; ``None`` sends none.
        config: SAM's settings.
    """

    def __init__(
        self, rules: HintRules | None = None, config: SamConfig | None = None
    ) -> None:
        self.name = "ours_no_hints" if rules is None else "hints"
        self._rules = rules
        self._config = config or SamConfig()
        self._clock = ManualClock()
        self.host: SamHost

    def attach(self, manager: KVCacheManager, workload: Workload) -> None:
        self.host = SamHost(manager, self._config, self._clock)

    def advance(self, now_s: float) -> None:
        self._clock.set(now_s)
        if self.host.is_due:
            self.host.advance()

    def on_arrival(self, turn: Turn, request: Request) -> None:
        if self._rules is not None:
            hint = self._rules.hint_with(turn)
            if hint is not None:
                request.kv_transfer_params = {"agent_hint": hint}
        self.host.on_request_added(request)

    def on_admitted(self, turn: Turn, request: Request, num_cached: int) -> None:
        self.host.on_blocks_assigned(request)

    def before_free(self, turn: Turn, request: Request) -> None:
        self.host.on_request_finished(request)

    def after_free(self, turn: Turn, request: Request) -> None:
        if self._rules is None:
            return
        key = SessionKey(TENANT, turn.session)
        ttl_s = self._rules.lease_after(turn)
        if ttl_s is not None:
            self.host.set_lease(key, ttl_s)
        edits = self._rules.edits_after(turn)
        if edits:
            self.host.apply_edits(key, edits)

    def num_leases_broken(self) -> int:
        return self.host.manager.stats().leases_broken
