"""One rank: bytes there and back, what it reports, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.engine_config import KVShape, kv_cache_config, vllm_config
from sam_connector.config import HostTierConfig
from sam_connector.connector import worker
from sam_connector.connector.metadata import RankResult, SAMConnectorMetadata
from sam_connector.connector.worker import WorkerSide
from sam_connector.errors import ConfigurationError
from sam_connector.transfer.contract import (
    CopyEngine,
    CopyJob,
    Direction,
    GroupCopy,
    JobResult,
)
from tests.connector.kv_model import RankModel

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 12
SHAPES = [
    KVShape(),
    KVShape(num_layers=3, layout="BLNHC", num_kv_heads=2),
    KVShape(layout="LHBNC", num_kv_heads=2),
    KVShape(mla=True),
    KVShape(num_full_groups=2),
]


def rank(shape: KVShape, stage: int = 0) -> tuple[RankModel, Any]:
    """A rank's memory and where its layers lie."""
    config = vllm_config(
        connector=None,
        block_size=16,
        async_scheduling=False,
        extra_config={},
        max_model_len=1_024,
        max_num_seqs=8,
        max_num_batched_tokens=1_024,
    )
    cache = kv_cache_config(config, NUM_BLOCKS, shape, stage)
    return RankModel(cache, stage), cache


class Worker:
    """A worker side with the memory it copies."""

    def __init__(
        self, shape: KVShape | None = None, *, host_bytes: int = 1 << 16, **more: Any
    ) -> None:
        self.model, cache = rank(shape or KVShape())
        more = {"rank": 0, "num_ranks": 1} | more
        self.side = WorkerSide(
            self.model.kv_caches, cache, HostTierConfig(host_bytes=host_bytes), **more
        )

    def pages(self, block_id: int) -> list[bytes]:
        return [self.model.page(block_id, name) for name in self.model.kv_caches]

    def fill(self) -> None:
        """Every byte of every block is different from its neighbours."""
        for number, layer in enumerate(self.model.layers):
            flat = layer.blocks.reshape(-1)
            flat[:] = range(number << 32, (number << 32) + flat.size)
            layer.blocks[...] = flat.reshape(layer.blocks.shape)

    def step(self, *jobs: CopyJob, **request_ids: int) -> Any:
        """The calls of one step, in vLLM's order; returns the transfer results."""
        ids = {job_id: request_id for request_id, job_id in request_ids.items()}
        metadata = SAMConnectorMetadata(jobs=jobs, request_ids=ids)
        self.side.start_loads(metadata)
        self.side.start_stores(metadata)
        self.side.engine.drain()
        return self.side.take_transfer_results()

    def results(self) -> list[RankResult]:
        report = self.side.take_report()
        return [] if report is None else sorted(report.results)


def job(
    job_id: int,
    direction: Direction,
    block_ids: list[int],
    slots: list[int],
    groups: int = 1,
) -> CopyJob:
    parts = tuple(GroupCopy(g, block_ids, slots) for g in range(groups))
    return CopyJob(job_id, direction, parts)


@pytest.fixture
def rank_0() -> Iterator[Worker]:
    made = Worker()
    made.fill()
    yield made
    made.side.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_byte_of_a_block_comes_back_and_no_other_changes(shape: KVShape) -> None:
    made = Worker(shape)
    made.fill()
    pages = [made.pages(block_id) for block_id in range(NUM_BLOCKS)]
    for group_id in range(shape.num_full_groups):
        part = GroupCopy(group_id, [5, 2, 9], [4 + group_id * 4, group_id, 7])
        made.step(CopyJob(1, Direction.STORE, (part,)))
        with made.model.borrowed():
            made.model.scramble([5, 2, 9])
            made.step(CopyJob(2, Direction.LOAD, (part,)))
            names = made.model.config.kv_cache_groups[group_id].layer_names
            for block_id in range(NUM_BLOCKS):
                for name, page in zip(
                    made.model.kv_caches, pages[block_id], strict=True
                ):
                    if name in names:
                        assert made.model.page(block_id, name) == page
    after = [made.pages(block_id) for block_id in range(NUM_BLOCKS)]
    assert after == pages
    assert all(result.error is None for result in made.results())
    made.side.close()


def test_a_load_goes_to_other_blocks_than_the_store_came_from(rank_0: Worker) -> None:
    before = rank_0.pages(3)
    rank_0.step(job(1, Direction.STORE, [3], [6]))
    rank_0.step(job(2, Direction.LOAD, [8], [6]))
    assert rank_0.pages(8) == before


def test_what_was_computed_in_the_step_is_what_is_stored(rank_0: Worker) -> None:
    metadata = SAMConnectorMetadata(jobs=(job(1, Direction.STORE, [3], [6]),))
    rank_0.side.start_loads(metadata)  # before the forward pass: no store yet
    assert rank_0.side.engine.num_in_flight == 0
    rank_0.model.scramble([3])  # which writes
    computed = rank_0.pages(3)
    rank_0.side.start_stores(metadata)
    rank_0.side.take_transfer_results()
    rank_0.model.scramble([3])
    rank_0.step(job(2, Direction.LOAD, [3], [6]))
    assert rank_0.pages(3) == computed


def test_a_job_is_started_once(rank_0: Worker) -> None:
    rank_0.step(job(1, Direction.LOAD, [3], [6]), job(2, Direction.STORE, [4], [7]))
    assert rank_0.results() == [RankResult(0, 1, None), RankResult(0, 2, None)]


# --- reports ----------------------------------------------------------------


def test_a_request_is_reported_with_its_load_and_nothing_else_is(
    rank_0: Worker,
) -> None:
    rank_0.step(job(1, Direction.STORE, [3, 4], [6, 7]))
    results = rank_0.step(
        job(2, Direction.LOAD, [3], [6]), job(3, Direction.LOAD, [4], [7]), r=2
    )
    assert results.finished_recving == {"r"}
    assert not results.failed_recving
    assert not results.finished_sending
    assert not rank_0.step().finished_recving


def test_a_load_that_failed_has_ended_as_well(rank_0: Worker) -> None:
    """vLLM waits for the end of every load, and asks which of them failed."""
    results = rank_0.step(job(1, Direction.LOAD, [3], [10_000]), r=1)
    assert results.finished_recving == results.failed_recving == {"r"}
    (result,) = rank_0.results()
    assert "10000" in str(result.error)


def test_the_job_that_stands_for_no_load_fails_everywhere(rank_0: Worker) -> None:
    refused = CopyJob(1, Direction.LOAD, (GroupCopy(-1, (), ()),))
    assert rank_0.step(refused, r=1).failed_recving == {"r"}


def test_a_report_is_taken_once(rank_0: Worker) -> None:
    assert rank_0.side.take_report() is None
    rank_0.step(job(1, Direction.STORE, [3], [6]))
    rank_0.step(job(2, Direction.STORE, [4], [7]))
    assert [result.job_id for result in rank_0.results()] == [1, 2]
    assert rank_0.side.take_report() is None


def test_what_goes_wrong_is_logged_and_reported_but_never_raised(
    rank_0: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sam_connector"):
        rank_0.step(job(1, Direction.STORE, [999], [6]))
    assert "copy failed" in caplog.text
    assert [r.job_id for r in rank_0.results() if r.error] == [1]


def test_a_rank_says_which_it_is() -> None:
    made = Worker(rank=2, num_ranks=4)
    made.step(job(1, Direction.STORE, [3], [6]))
    assert made.results() == [RankResult(2, 1, None)]
    made.side.close()


class SlowEngine(CopyEngine):
    """Ends nothing on its own; remembers how long it was waited for."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []
        self.jobs: list[CopyJob] = []

    def submit(self, job: CopyJob) -> None:
        self.jobs.append(job)

    def poll(self) -> list[JobResult]:
        return []

    def drain(self, timeout_s: float | None = None) -> bool:
        self.waits.append(timeout_s)
        return False

    @property
    def num_in_flight(self) -> int:
        return len(self.jobs)

    def close(self) -> None:
        self.jobs.clear()


def test_a_step_waits_for_copies_so_long_and_no_longer(rank_0: Worker) -> None:
    rank_0.side.engine.close()
    engine = rank_0.side.engine = SlowEngine()
    rank_0.side.take_transfer_results()
    assert engine.waits == []
    engine.submit(job(1, Direction.LOAD, [3], [6]))
    rank_0.side.take_transfer_results()
    (limit,) = engine.waits
    assert limit is not None
    assert 0 < limit <= 0.1


def test_on_a_gpu_no_step_waits_for_copies(rank_0: Worker) -> None:
    rank_0.side.engine.close()
    engine = rank_0.side.engine = SlowEngine()
    rank_0.side._finishes_in_step = False
    engine.submit(job(1, Direction.LOAD, [3], [6]))
    rank_0.side.take_transfer_results()
    assert engine.waits == []


# --- memory -----------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "num_slots"), [(1, 128), (2, 64), (3, 42)])
def test_the_ranks_share_the_host_memory(num_ranks: int, num_slots: int) -> None:
    made = Worker(rank=0, num_ranks=num_ranks, host_bytes=128 * 512)
    assert made.side.handshake.num_slots == num_slots
    assert made.side.pool.num_bytes <= 128 * 512 // num_ranks
    made.side.close()


def test_too_little_for_one_block_stops_the_start() -> None:
    with pytest.raises(ConfigurationError, match="too little for one block: 100 bytes"):
        Worker(host_bytes=100)


def test_memory_that_is_not_there_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("only 7 bytes are available")

    monkeypatch.setattr(worker, "HostPool", refuse)
    with pytest.raises(ConfigurationError, match="host_bytes: only 7 bytes"):
        Worker()


def test_close_ends_what_is_under_way_and_is_safe_to_repeat() -> None:
    made = Worker()
    made.side.close()
    made.side.close()
    metadata = SAMConnectorMetadata(jobs=(job(1, Direction.STORE, [3], [6]),))
    made.side.start_stores(metadata)
    made.side.take_transfer_results()
    assert [r.job_id for r in made.results() if r.error] == [1]
