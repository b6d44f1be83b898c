"""The workers of an engine without its model: several ranks, real bytes.

    scheduler = make_scheduler("sam", kv_shape=shape, tensor_parallel_size=2)
    ranks = Ranks(scheduler, shape, gate=GatePlan(hold=True))
    engine = FakeEngine(scheduler, ranks)
    engine.step()               # verifies what is attended to, on every rank
    ranks.check_prefix_cache()  # and what could be
    ranks.release()             # or ranks.gates[1].release(job_id)

Each rank has its own connector of the class under test, its own memory and its own
block tables, and calls the connector in the order in which vLLM's model runner does.
What passes between scheduler and ranks is pickled, as between processes.
"""

from __future__ import annotations

import copy
import pickle
from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import BlockHash, get_block_hash, get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.engine_config import KVShape, kv_cache_config
from sam_connector.transfer.contract import CopyJob, Direction, GroupCopy
from tests.connector.copy_gate import CopyGate, GatePlan
from tests.connector.kv_model import Chunk, RankModel, Row, Words


class RankWorker:
    """One rank: a connector in the worker role, memory and block tables.

    Args:
        config: the engine's; the rank sees a copy that names it.
        cache: where this rank's layers lie.
        rank: of the whole engine.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, rank: int) -> None:
        self.rank = rank
        self.config = copy.copy(config)
        self.config.parallel_config = copy.copy(config.parallel_config)
        self.config.parallel_config.rank = rank
        self.model = RankModel(cache, rank)
        with set_current_vllm_config(self.config):
            self.connector: Any = KVConnectorFactory.create_connector(
                self.config, KVConnectorRole.WORKER, cache
            )
            self.connector.register_kv_caches(self.model.kv_caches)

    @property
    def worker_side(self) -> Any:
        """The part of ``SAMConnector`` that copies, if there is one."""
        children = getattr(self.connector, "sub_connectors", ())
        sides = (getattr(c, "worker_side", None) for c in (self.connector, *children))
        return next((side for side in sides if side is not None), None)

    def handshake(self) -> dict[tuple[int, int], Any] | None:
        metadata = self.connector.get_handshake_metadata()
        if metadata is None:
            return None
        stage_size = self.config.parallel_config.tensor_parallel_size
        return {divmod(self.rank, stage_size): pickled(metadata)}

    def execute(self, scheduled: SchedulerOutput) -> KVConnectorOutput:
        """Runs one step; see ``KVConnectorModelRunnerMixin``."""
        connector = self.connector
        context = SimpleNamespace(attn_metadata=None, no_compile_layers={})
        metadata = pickled(scheduled.kv_connector_metadata)
        chunks = self.model.accept(scheduled)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if scheduled.has_sync_kv_loads:
            connector.start_load_kv(context)
        self._forward(chunks)
        if not scheduled.has_sync_kv_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        results = connector.get_transfer_results(scheduled.finished_req_ids)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        reported: KVConnectorOutput = pickled(output)
        return reported

    def _forward(self, chunks: list[Chunk]) -> None:
        if not chunks:
            return
        for name in self.model.kv_caches:
            self.connector.wait_for_layer_load(name)
        self.model.compute(chunks)
        for name, cache in self.model.kv_caches.items():
            self.connector.save_kv_layer(name, cache, None)


class Ranks:
    """All ranks of an engine, and what its executor does for them.

    To be given to ``FakeEngine`` as its worker.

    Args:
        scheduler: whose connector they work for.
        shape: of the KV cache; as given to ``make_scheduler``.
        gate: puts a gate in front of the copy engine of each rank that has one.
        report_lag: ranks whose reports come that many steps late.

    Attributes:
        workers: by rank.
        gates: by rank; empty without a ``gate`` or anything to copy.
        num_steps: steps that were executed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        shape: KVShape,
        *,
        gate: GatePlan | None = None,
        report_lag: Mapping[int, int] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.num_steps = 0
        config = scheduler.vllm_config
        parallel = config.parallel_config
        self.workers = []
        for rank in range(parallel.world_size):
            stage = rank // parallel.tensor_parallel_size
            cache = kv_cache_config(
                config, scheduler.kv_cache_config.num_blocks, shape, stage
            )
            self.workers.append(RankWorker(config, cache, rank))
        self.gates: list[CopyGate] = []
        for worker in self.workers:
            if gate is not None and (side := worker.worker_side) is not None:
                side.engine = CopyGate(side.engine, worker.rank, gate)
                self.gates.append(side.engine)
        assert scheduler.connector is not None
        self._aggregator = KVOutputAggregator.from_connector(
            scheduler.connector, parallel.world_size
        )
        lag = report_lag or {}
        self._reports = [
            deque([KVConnectorOutput() for _ in range(lag.get(worker.rank, 0))])
            for worker in self.workers
        ]
        #: What every full block that was ever computed holds.
        self._marks: dict[BlockHash, Words] = {}
        self._followed: dict[str, tuple[Request, Row]] = {}
        self._scramble_new_blocks()
        self._shake_hands()

    def __call__(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        self.num_steps += 1
        outputs: list[ModelRunnerOutput | None] = []
        for worker, reports in zip(self.workers, self._reports, strict=True):
            reports.append(worker.execute(scheduled))
            output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            output.kv_connector_output = reports.popleft()
            outputs.append(output)
        self._follow(scheduled)
        combined = self._aggregator.aggregate(outputs)
        assert combined is not None
        reported: KVConnectorOutput | None = combined.kv_connector_output
        return reported

    def release(self) -> None:
        """Lets all held copies of all ranks finish at their next poll."""
        for gate in self.gates:
            gate.release()

    def open(self) -> None:
        """Holds nothing any longer, now or later."""
        for gate in self.gates:
            gate.open()

    def reload_weights(self) -> None:
        """New weights: whatever was computed or saved before is wrong from now on."""
        self._marks.clear()
        for worker in self.workers:
            worker.model.reload_weights()

    def check_prefix_cache(self) -> None:
        """Every block that a request could hit holds what its hash says, everywhere.

        Raises:
            AssertionError: naming block, layer and rank.
        """
        self._learn()
        groups: dict[int, dict[int, Words]] = {}
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                marks = self._marks.get(get_block_hash(block.block_hash))
                assert marks is not None, f"nobody computed block {block.block_id}"
                group = groups.setdefault(get_group_id(block.block_hash), {})
                group[block.block_id] = marks
        for worker in self.workers:
            for group_id, by_block in groups.items():
                wrong = next(worker.model.wrong_blocks(group_id, by_block), None)
                assert wrong is None, (
                    f"block {wrong[0]} has a hash and wrong bytes in {wrong[1]} "
                    f"on rank {worker.rank}"
                )

    def check_host_slots(self, slots: Mapping[tuple[int, BlockHash], int]) -> None:
        """Every host slot holds what its content says, on every rank.

        Reads them the way a request would, by loading them. Needs a gate.

        Args:
            slots: by group and block hash.

        Raises:
            AssertionError: naming slot, layer and rank.
        """
        groups: dict[int, list[tuple[int, Words]]] = {}
        for (group_id, block_hash), slot in slots.items():
            assert block_hash in self._marks, f"nobody computed slot {slot}"
            groups.setdefault(group_id, []).append((slot, self._marks[block_hash]))
        num_at_once = self.scheduler.kv_cache_config.num_blocks
        for worker, gate in zip(self.workers, self.gates, strict=True):
            for group_id, held in groups.items():
                for first in range(0, len(held), num_at_once):
                    batch = dict(held[first : first + num_at_once])
                    self._check_slots(worker, gate, group_id, batch)

    def expected_pages(self, block_hash: BlockHash, rank: int) -> dict[str, bytes]:
        """What each layer holds for a block, as ``RankModel.page`` gives it."""
        marks = self._marks[block_hash]
        layers = self.workers[rank].model.layers
        return {layer.name: layer.values(marks).tobytes() for layer in layers}

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()

    # --- internals --------------------------------------------------------------------

    def _check_slots(
        self, worker: RankWorker, gate: CopyGate, group_id: int, held: dict[int, Words]
    ) -> None:
        slots = list(held)
        part = GroupCopy(group_id, list(range(len(slots))), slots)
        with worker.model.borrowed():
            gate.copy_now(CopyJob(-1, Direction.LOAD, (part,)))
            marks = dict(enumerate(held.values()))
            wrong = next(worker.model.wrong_blocks(group_id, marks), None)
        assert wrong is None, (
            f"host slot {slots[wrong[0]]} holds wrong bytes of {wrong[1]} "
            f"on rank {worker.rank}"
        )

    def _follow(self, scheduled: SchedulerOutput) -> None:
        rows = self.workers[0].model.rows
        for request_id in scheduled.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            self._followed[request_id] = request, rows[request_id]
        self._learn()
        for request_id in scheduled.finished_req_ids:
            if request_id not in rows:
                self._followed.pop(request_id, None)

    def _learn(self) -> None:
        """Keeps what full blocks hold; a hash may be known only after the step."""
        size = self.scheduler.block_size
        for request, row in self._followed.values():
            num_full = min(len(row.marks) // size, len(request.block_hashes))
            for index in range(num_full):
                marks = row.marks[index * size : (index + 1) * size]
                known = self._marks.setdefault(request.block_hashes[index], marks)
                assert known[-1] == marks[-1], (
                    f"one hash for two contents: block {index} of {row.request_id}"
                )

    def _scramble_new_blocks(self) -> None:
        """What a block held before it was handed out is gone."""
        pool = self.scheduler.kv_cache_manager.block_pool
        get_new_blocks = pool.get_new_blocks

        def get_scrambled_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            for worker in self.workers:
                worker.model.scramble(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = get_scrambled_blocks  # type: ignore[method-assign]

    def _shake_hands(self) -> None:
        """As ``EngineCore`` does once the workers have registered their memory."""
        metadata: dict[tuple[int, int], Any] = {}
        for worker in self.workers:
            metadata |= worker.handshake() or {}
        connector = self.scheduler.get_kv_connector()
        if metadata and connector is not None:
            connector.set_xfer_handshake_metadata_pp_aware(metadata)


def pickled(value: Any) -> Any:
    """The value as it arrives in another process."""
    return pickle.loads(pickle.dumps(value))
