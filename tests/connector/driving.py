"""Driving the real scheduler with ``SAMConnector`` and a runner of ours.

with TieredDriver(tensor_parallel_size=2, gate=GatePlan(hold=True)) as driver:
    driver.add("r0", STREAMS[0][:160], agent_hint=hint("s", ttl=60))
    driver.step()               # verifies the bytes of every rank
    driver.ranks.release()      # or driver.ranks.gates[1].release()
    driver.check_no_leak()
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from benchmarks.engine_config import KVShape
from benchmarks.scheduler_harness import (
    FakeEngine,
    check_idle_pool,
    make_request,
    make_scheduler,
)
from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.core.manager import SessionAwareManager
from tests.connector.copy_gate import GatePlan
from tests.connector.ranks import Ranks

BLOCK_SIZE = 16

#: Lets everything through, one copy after the other on the test's own thread.
SYNCHRONOUS = GatePlan()

#: Accounts of the tier that are zero once nothing is going on.
IDLE_ACCOUNTS = (
    "host_held_slots",
    "host_pinned_slots",
    "gpu_pinned_blocks",
    "jobs_in_flight",
    "operations_open",
    "queued_saves",
)

#: Requests drawn from few token streams share prefixes of any length.
STREAMS = [random.Random(seed).choices(range(32_000), k=4_096) for seed in range(6)]


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


class TieredDriver(Driver):
    """A ``Driver`` whose engine has ranks that hold bytes.

    Args:
        connector: as for ``make_scheduler``.
        host_bytes: size of the host tier; ``None`` for no such setting.
        extra_config: further settings.
        shape: of the KV cache.
        gate: goes in front of the copy engine of each rank; ``None`` for the
            engine's own threads, with no look into the host slots.
        report_lag: ranks whose reports come that many steps late.
        **options: as for ``make_scheduler``.
    """

    def __init__(
        self,
        connector: Any = "sam",
        *,
        host_bytes: int | None = 1 << 20,
        extra_config: Mapping[str, Any] | None = None,
        shape: KVShape | None = None,
        gate: GatePlan | None = SYNCHRONOUS,
        report_lag: Mapping[int, int] | None = None,
        **options: Any,
    ) -> None:
        shape = shape or KVShape()
        settings = dict(extra_config or {})
        if host_bytes is not None:
            settings.setdefault("host_bytes", host_bytes)
        super().__init__(connector, extra_config=settings, kv_shape=shape, **options)
        self.ranks = Ranks(self.scheduler, shape, gate=gate, report_lag=report_lag)
        self.engine.worker = self.ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what the connectors started; also right after a failure."""
        self.ranks.shutdown()
        self.scheduler.shutdown()

    @property
    def tier(self) -> Any:
        """The host tier of the scheduler side, if it has one."""
        return getattr(self.side, "tier", None)

    def step(self, count: int = 1) -> None:
        """Engine iterations, everything checked after each."""
        for _ in range(count):
            self.engine.step()
            self.check()

    def wait(self, op: str, max_steps: int = 1_000, **arguments: Any) -> dict[str, Any]:
        """A control call, stepped until it is answered."""
        payload = json.dumps({"op": op, **arguments})
        answer = self.side.control(payload, is_paused=False)
        for _ in range(max_steps):
            if isinstance(answer, str):
                break
            if answer.done():
                answer = answer.result()
                break
            self.step()
        assert not isinstance(answer, Future), f"{op}: no answer in {max_steps} steps"
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def check(self) -> None:
        super().check()
        if self.tier is not None:
            self.tier.check_integrity()
        self.ranks.check_prefix_cache()
        if self.tier is not None and self.ranks.gates:
            pool = self.tier.state.slots
            self.ranks.check_host_slots({c: pool.get(c).index for c in pool.contents()})

    def check_no_leak(self) -> None:
        self.ranks.open()
        super().check_no_leak()
        assert not any(gate.num_in_flight for gate in self.ranks.gates)
        if self.tier is not None:
            stats = self.tier.stats()
            for account in IDLE_ACCOUNTS:
                assert stats[account] == 0, (account, stats)


def hint(session_id: str, ttl: float | None = None, **more: Any) -> dict[str, Any]:
    """An ``agent_hint`` as it reaches the engine."""
    wire: dict[str, Any] = {"session_id": session_id, **more}
    if ttl is not None:
        wire["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return wire


def evict_when_done(session_id: str) -> dict[str, Any]:
    return hint(session_id, context_management={"edits": [{"type": "evict"}]})
