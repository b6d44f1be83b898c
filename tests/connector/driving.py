"""Driving the real scheduler with ``SAMConnector`` and a runner of ours."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from benchmarks.scheduler_harness import (
    FakeEngine,
    check_idle_pool,
    make_request,
    make_scheduler,
)
from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.core.manager import SessionAwareManager

BLOCK_SIZE = 16

#: Requests drawn from few token streams share prefixes of any length.
STREAMS = [
    [random.Random(seed).randrange(32_000) for _ in range(4_096)] for seed in range(6)
]


class Driver:
    """A scheduler with ``SAMConnector``, checked after every step.

    Args:
        connector: as for ``make_scheduler``.
        **options: likewise.
    """

    def __init__(self, connector: Any = "sam", **options: Any) -> None:
        options.setdefault("block_size", BLOCK_SIZE)
        options.setdefault("num_blocks", 64)
        self.scheduler = make_scheduler(connector, **options)
        self.engine = FakeEngine(self.scheduler)

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def side(self) -> SchedulerSide:
        connector: Any = self.scheduler.connector
        for candidate in (connector, *getattr(connector, "sub_connectors", ())):
            side = getattr(candidate, "scheduler_side", None)
            if isinstance(side, SchedulerSide):
                return side
        raise AssertionError("no SAMConnector is bound")

    @property
    def manager(self) -> SessionAwareManager:
        host = self.side.host
        assert host is not None, "session hints went off: see the log"
        return host.manager

    def add(self, request_id: str, tokens: list[int], **options: Any) -> Any:
        request = make_request(request_id, tokens, block_size=BLOCK_SIZE, **options)
        self.scheduler.add_request(request)
        return request

    def run(self, request_id: str, tokens: list[int], **options: Any) -> list[int]:
        """Runs one request to its end; returns its tokens."""
        self.add(request_id, tokens, **options)
        self.engine.run_until_idle()
        self.check()
        return self.engine.outputs[request_id]

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """A control call that is answered at once."""
        payload = json.dumps({"op": op, **arguments})
        answer = self.side.control(payload, is_paused=False)
        assert not isinstance(answer, Future)
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def edit(self, session_id: str, *edits: Mapping[str, Any]) -> list[dict[str, Any]]:
        reply = self.call(
            "apply_edits", tenant="", session_id=session_id, edits=list(edits)
        )
        results: list[dict[str, Any]] = reply["result"]["results"]
        return results

    def free_ids(self) -> list[int]:
        """Free blocks, next to be reused first."""
        return [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]

    def resident(self, request: Any) -> list[int]:
        """Blocks of a request's content that are in the prefix cache, in order."""
        groups = [0]
        found = []
        for block_hash in request.block_hashes:
            blocks = self.pool.get_cached_block(block_hash, groups)
            if blocks is not None:
                found.append(blocks[0].block_id)
        return found

    def check(self) -> None:
        """Every account agrees with every other."""
        self.manager.check_integrity()
        self.pool.free_block_queue.check_integrity()

    def check_no_leak(self) -> None:
        """With all sessions freed nothing of ours is left."""
        self.engine.run_until_idle()
        for session in list(self.manager.book.sessions):
            self.call("free_session", tenant="", session_id=session.key.session_id)
        check_idle_pool(self.scheduler)
        self.check()
        stats = self.call("get_stats")["result"]
        for account in (
            "sessions",
            "contexts",
            "records",
            "timers",
            "running_requests",
            "claimed_blocks",
            "protected_blocks",
            "waiters",
            "internal_errors",
        ):
            assert stats[account] == 0, (account, stats)
        assert stats["free_blocks"] == stats["total_blocks"]


def hint(session_id: str, ttl: float | None = None, **more: Any) -> dict[str, Any]:
    """An ``agent_hint`` as it reaches the engine."""
    wire: dict[str, Any] = {"session_id": session_id, **more}
    if ttl is not None:
        wire["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return wire


def evict_when_done(session_id: str) -> dict[str, Any]:
    return hint(session_id, context_management={"edits": [{"type": "evict"}]})
