"""Our arms: the connector's own scheduler side, host tier included, on virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from benchmarks.trace_replay.engine_parts import engine_config
from benchmarks.trace_replay.hints import Call, Harness, HintRules
from benchmarks.trace_replay.policies import CopyOrder, Policy
from sam_connector.config import SamConfig
from sam_connector.connector.metadata import RankResult, WorkerReport
from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.core.clock import ManualClock
from sam_connector.core.types import Edit, SessionKey
from sam_connector.transfer.contract import Direction

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from benchmarks.trace_replay.workload import Turn, Workload
    from sam_connector.core.slot_pool import Content

TENANT = ""


class SamPolicy(Policy):
    """Hosts what the connector has in the engine core, with ranks that are a link.

    Args:
        name: of the arm.
        rules: the hints; ``None`` sends none.
        config: ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        name: str,
        rules: HintRules | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self._rules = rules
        self._extra_config = {"ranges": True, **(config or {})}
        self._clock = ManualClock()
        self._harness: Harness | None = None
        self._prefetched: set[Content] = set()
        self._num_used = 0
        self._counts: Counter[str] = Counter()
        self.side: SchedulerSide

    @override
    def attach(
        self, manager: KVCacheManager, kv_cache_config: KVCacheConfig, plan: Workload
    ) -> None:
        super().attach(manager, kv_cache_config, plan)
        self._manager = manager
        self._block_size = plan.block_size
        vllm_config, _ = engine_config(
            kv_cache_config.num_blocks,
            plan.block_size,
            manager.max_model_len,
            connector="sam",
            extra_config=self._extra_config,
        )
        self.side = SchedulerSide(
            manager,
            SamConfig.from_extra_config(self._extra_config),
            vllm_config,
            kv_cache_config,
            self._clock,
        )
        if self._rules is not None:
            self._harness = Harness(self._rules, plan)

    @override
    def advance(self, now_s: float) -> None:
        self._clock.set(now_s)

    @override
    def on_ready(self, turn: Turn) -> None:
        if self._harness is not None:
            self._send(self._harness.on_ready(turn))

    @override
    def on_arrival(self, turn: Turn, request: Request) -> None:
        if self._harness is not None:
            hint = self._harness.hint(turn)
            if hint is not None:
                request.kv_transfer_params = {"agent_hint": hint}
            self._harness.on_arrival(turn, self._clock.now())
        self.side.on_new_request(request)

    @override
    def look_up(self, request: Request, num_local: int) -> int | None:
        return self.side.num_new_matched_tokens(request, num_local)

    @override
    def on_blocks_assigned(
        self, turn: Turn, request: Request, blocks: KVCacheBlocks, num_external: int
    ) -> None:
        self.side.on_blocks_assigned(request, blocks, num_external)

    @override
    def on_admitted(self, turn: Turn, request: Request, num_cached: int) -> None:
        if self._prefetched:
            for block_hash in request.block_hashes[: num_cached // self._block_size]:
                content = (0, bytes(block_hash))
                if content in self._prefetched:
                    self._prefetched.remove(content)
                    self._num_used += 1

    @property
    @override
    def is_due(self) -> bool:
        return self.side.tier is not None and self.side.tier.is_due

    @override
    def on_step(self) -> Sequence[CopyOrder]:
        metadata = self.side.on_step()
        if not metadata.jobs:
            return ()
        return [self._order(job.job_id, metadata.request_ids) for job in metadata.jobs]

    @override
    def on_copied(self, job_id: int, *, failed: bool) -> None:
        result = RankResult(0, job_id, "no such group" if failed else None)
        self.side.on_report(WorkerReport(results=frozenset({result})))

    @override
    def before_free(self, turn: Turn, request: Request) -> None:
        block_ids = self._manager.get_block_ids(request.request_id)
        self.side.on_request_finished(request, block_ids)

    @override
    def on_answer(self, turn: Turn) -> None:
        if self._harness is not None:
            self._send(self._harness.on_answer(turn, self._clock.now()))

    @override
    def num_kept(self) -> int:
        if self._rules is None:
            return super().num_kept()
        assert self.side.host is not None
        queue = self.side.host.pool.free_queue
        return len(self._pool.blocks) - 1 - queue.num_unclaimed

    @override
    def num_prefetched_blocks_used(self) -> int:
        return self._num_used

    @override
    def counts(self) -> Mapping[str, int]:
        assert self.side.host is not None, "session management switched itself off"
        stats = self.side.host.manager.stats()
        counts = {"leases_broken": stats.leases_broken, **self._counts}
        if self.side.tier is not None:
            tier = self.side.tier.stats()
            counts |= {
                name: tier[name]
                for name in ("host_displaced", "failed_loads", "saves_dropped")
            }
        return counts

    def _order(self, job_id: int, request_ids: Mapping[int, str]) -> CopyOrder:
        assert self.side.tier is not None
        job = self.side.tier.state.jobs.open_jobs()[job_id]
        request_id = request_ids.get(job_id)
        is_prefetch = job.direction is Direction.LOAD and request_id is None
        if is_prefetch:
            self._prefetched.update(job.contents)
        return CopyOrder(
            job_id, job.direction, len(job.copies), request_id, is_prefetch
        )

    def _send(self, calls: Iterable[Call]) -> None:
        host = self.side.host
        assert host is not None
        for call in calls:
            key = SessionKey(TENANT, call.session)
            if call.edit is None:
                host.set_lease(
                    key, call.ttl_s, expected_resume_s=call.expected_resume_s
                )
            else:
                edit = Edit(
                    type=call.edit,
                    block_start=call.block_start,
                    block_end=call.block_end,
                )
                results = host.apply_edits(key, [edit])
                self._counts[f"{call.edit}/{results[0].status}"] += 1
