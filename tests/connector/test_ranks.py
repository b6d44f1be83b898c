"""The runner of ours: right bytes pass, and every kind of wrong ones is noticed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from benchmarks.scheduler_harness import (
    FakeEngine,
    KVShape,
    check_idle_pool,
    expected_output,
    make_request,
    make_scheduler,
)
from tests.connector.copy_gate import GatePlan
from tests.connector.driving import BLOCK_SIZE, STREAMS, TieredDriver, hint
from tests.connector.ranks import Ranks
from tests.connector.toy_connector import ToyConnector

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]

TOY = ("ToyConnector", "tests.connector.toy_connector")

SHAPES = [
    KVShape(),
    KVShape(layout="BLNHC"),
    KVShape(layout="LHBNC", num_kv_heads=2),
    KVShape(mla=True, head_size=4),
    KVShape(num_full_groups=2),
    KVShape(sliding_window=40),
    KVShape(layout="BLHNC", num_full_groups=2, sliding_window=40, num_layers=3),
]

ENGINES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"tensor_parallel_size": 2, "async_scheduling": True},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


class Toy:
    """An engine with the toy connector, checked after every step."""

    def __init__(
        self,
        *,
        fault: str | None = None,
        gate: GatePlan | None = None,
        report_lag: dict[int, int] | None = None,
        shape: KVShape | None = None,
        connector: Any = TOY,
        **options: Any,
    ) -> None:
        shape = shape or KVShape()
        options.setdefault("num_blocks", 64)
        self.scheduler = make_scheduler(
            connector, kv_shape=shape, extra_config={"fault": fault}, **options
        )
        self.ranks = Ranks(self.scheduler, shape, gate=gate, report_lag=report_lag)
        self.engine = FakeEngine(self.scheduler, self.ranks)

    @property
    def connector(self) -> ToyConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, ToyConnector)
        return connector

    @property
    def host_slots(self) -> dict[tuple[int, Any], int]:
        return {
            (group_id, block_hash): slot
            for block_hash, slots in self.connector._slots.items()
            for group_id, slot in enumerate(slots)
        }

    def add(self, request_id: str, tokens: list[int], max_tokens: int = 1) -> None:
        request = make_request(request_id, tokens, max_tokens=max_tokens)
        self.scheduler.add_request(request)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.ranks.check_prefix_cache()

    def finish(self, max_steps: int = 3_000) -> None:
        for _ in range(max_steps):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError("never idle")

    def run(self, request_id: str, tokens: list[int], max_tokens: int = 1) -> None:
        self.add(request_id, tokens, max_tokens)
        self.finish()

    def save_and_load(self) -> None:
        """A prompt is saved, displaced, and loaded again."""
        self.run("save", STREAMS[0][:200])
        assert self.scheduler.reset_prefix_cache()
        self.run("other", STREAMS[1][:200])
        self.run("load", STREAMS[0][:200], max_tokens=20)
        assert self.connector.num_loads == 1
        assert self.engine.outputs["load"] == expected_output("load", 200, 20)


def traffic(toy: Toy, seed: int, num_requests: int = 60) -> None:
    """Prompts that share prefixes, some aborted, in a pool that is too small."""
    rng = random.Random(seed)
    expected = {}
    for number in range(num_requests):
        tokens = rng.choice(STREAMS)[: rng.randrange(1, 300)]
        max_tokens = rng.randrange(1, 60)
        expected[f"r{number}"] = len(tokens), max_tokens
        toy.add(f"r{number}", tokens, max_tokens)
        if rng.random() < 0.1:
            toy.engine.abort(rng.choice(sorted(toy.scheduler.requests)))
        toy.step(rng.randrange(6))
    toy.ranks.open()
    toy.finish()
    for request_id in expected.keys() & toy.engine.finished.keys():
        output = toy.engine.outputs[request_id]
        assert output == expected_output(request_id, *expected[request_id])
    check_idle_pool(toy.scheduler)


# --- right bytes pass -----------------------------------------------------------------


@pytest.mark.parametrize("options", ENGINES[1::2])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_engine_without_a_tier_attends_to_what_it_wrote(
    shape: KVShape, options: dict[str, Any]
) -> None:
    """Prefix hits, chunks, preemptions, windows: vLLM alone passes the byte check."""
    num_groups = shape.num_full_groups + (shape.sliding_window is not None)
    toy = Toy(
        connector="null",
        shape=shape,
        num_blocks=26 * num_groups,
        max_num_batched_tokens=64,
        **options,
    )
    for number in range(8):
        toy.add(f"r{number}", STREAMS[number % 4][: 100 + number * 5], 60)
    num_preemptions = 0
    while not toy.engine.is_idle:
        toy.step()
        requests = toy.scheduler.requests.values()
        num_preemptions += sum(request.num_preemptions for request in requests)
    assert num_preemptions
    check_idle_pool(toy.scheduler)


@pytest.mark.parametrize("options", ENGINES)
@pytest.mark.parametrize(
    "shape", [KVShape(), KVShape(layout="BLNHC", num_full_groups=2), KVShape(mla=True)]
)
def test_a_load_brings_back_what_was_saved(
    shape: KVShape, options: dict[str, Any]
) -> None:
    toy = Toy(shape=shape, **options)
    toy.save_and_load()
    check_idle_pool(toy.scheduler)


@pytest.mark.parametrize(
    ("seed", "copy_at"), [(0, "submit"), (1, "release"), (2, "either")]
)
@pytest.mark.parametrize("options", ENGINES[1:])
def test_copies_that_are_late_shuffled_and_failing(
    seed: int, options: dict[str, Any], copy_at: Any
) -> None:
    gate = GatePlan(
        copy_at=copy_at, max_delay=6, shuffle=True, failure_rate=0.1, seed=seed
    )
    toy = Toy(gate=gate, max_num_batched_tokens=96, **options)
    traffic(toy, seed)
    assert toy.connector.num_loads


def test_ranks_that_report_in_different_steps() -> None:
    toy = Toy(tensor_parallel_size=3, report_lag={1: 2, 2: 5}, async_scheduling=True)
    toy.save_and_load()
    traffic(toy, seed=1)


def test_stages_of_different_depth() -> None:
    toy = Toy(shape=KVShape(num_layers=(3, 1)), pipeline_parallel_size=2)
    names = [list(worker.model.kv_caches) for worker in toy.ranks.workers]
    assert names == [["layer.0", "layer.1", "layer.2"], ["layer.3"]]
    toy.save_and_load()


# --- wrong bytes do not ---------------------------------------------------------------


@pytest.mark.parametrize("fault", ["wrong_block", "no_load"])
def test_a_wrong_load_is_noticed(fault: str) -> None:
    with pytest.raises(AssertionError, match="wrong bytes"):
        Toy(fault=fault).save_and_load()


def test_a_rank_that_skips_a_load_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"on rank 1"):
        Toy(fault="rank_skips", tensor_parallel_size=2).save_and_load()


def test_a_load_reported_before_it_is_done_is_noticed() -> None:
    toy = Toy()
    toy.run("save", STREAMS[0][:200])
    assert toy.scheduler.reset_prefix_cache()
    side: Any = toy.ranks.workers[0].connector.worker_side
    copied = side.engine.submit

    def copy_first_block_only(job: Any) -> None:
        (part,) = job.parts
        first = type(part)(part.group_id, part.block_ids[:1], part.slots[:1])
        copied(type(job)(job.job_id, job.direction, (first,)))

    side.engine.submit = copy_first_block_only
    # Blocks of 16 tokens: the second starts at position 16.
    with pytest.raises(AssertionError, match="position 16 "):
        toy.run("load", STREAMS[0][:200])


def test_one_rank_speaking_for_all_is_noticed() -> None:
    """Rank 1's save failed; the blocks are offered all the same."""
    gate = GatePlan(fail={1: [0]})
    with pytest.raises(AssertionError, match="on rank 1"):
        Toy(fault="one_rank", gate=gate, tensor_parallel_size=2).save_and_load()


def test_blocks_freed_while_they_are_saved_are_noticed() -> None:
    def scenario(fault: str | None) -> None:
        toy = Toy(fault=fault, gate=GatePlan(hold=True), num_blocks=24)
        toy.add("save", STREAMS[0][:200])
        toy.step(2)
        toy.add("other", STREAMS[1][:300])
        toy.step(4)
        toy.ranks.open()
        toy.finish()
        toy.run("load", STREAMS[0][:200])
        assert toy.connector.num_loads == 1

    scenario(fault=None)
    with pytest.raises(AssertionError, match="wrong bytes"):
        scenario(fault="early_free")


def test_a_failed_save_leaves_nothing_to_load() -> None:
    toy = Toy(gate=GatePlan(fail={0: [0]}))
    toy.run("save", STREAMS[0][:200])
    assert toy.scheduler.reset_prefix_cache()
    toy.run("again", STREAMS[0][:200])
    assert toy.connector.num_loads == 0


def test_a_failed_load_is_computed_instead() -> None:
    toy = Toy(gate=GatePlan(fail={0: [1]}))
    toy.run("save", STREAMS[0][:200])
    assert toy.scheduler.reset_prefix_cache()
    toy.run("load", STREAMS[0][:200], max_tokens=3)
    assert toy.connector.num_loads == 1
    assert toy.engine.outputs["load"] == expected_output("load", 200, 3)
    check_idle_pool(toy.scheduler)


@pytest.mark.parametrize("group_id", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_overwritten_block_is_noticed(rank: int, group_id: int) -> None:
    shape = KVShape(num_full_groups=2)
    toy = Toy(connector="null", shape=shape, tensor_parallel_size=2)
    toy.add("r", STREAMS[0][:100], max_tokens=30)
    toy.step(3)
    model = toy.ranks.workers[rank].model
    block_id = model.rows["r"].block_ids[group_id][2]
    layer = next(layer for layer in model.layers if layer.group_id == group_id)
    layer.blocks[block_id, 0, 5, 0] += 1
    with pytest.raises(AssertionError) as caught:
        toy.engine.step()
    assert f"position 37 of {layer.name} on rank {rank} for request r" in str(
        caught.value
    )


def test_a_wrong_block_that_nobody_asked_for_is_noticed() -> None:
    toy = Toy(connector="null", tensor_parallel_size=2)
    toy.run("r", STREAMS[0][:100])
    toy.ranks.workers[1].model.layers[1].blocks[3, 0, 0, 0] += 1
    with pytest.raises(AssertionError, match=r"block 3 .* in layer\.1 on rank 1"):
        toy.ranks.check_prefix_cache()


def test_a_block_handed_out_anew_does_not_hold_what_it_did() -> None:
    """Or a load that was never done might pass by luck."""
    toy = Toy(connector="null", num_blocks=8, tensor_parallel_size=2)
    toy.run("r", STREAMS[0][:100])
    models = [worker.model for worker in toy.ranks.workers]
    before = [[m.page(block_id, "layer.1") for m in models] for block_id in range(8)]
    (block,) = toy.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    for model, page in zip(models, before[block.block_id], strict=True):
        assert model.page(block.block_id, "layer.1") != page


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_host_slot_is_noticed(rank: int) -> None:
    shape = KVShape(num_full_groups=2)
    toy = Toy(shape=shape, gate=GatePlan(), num_blocks=32, tensor_parallel_size=2)
    # More slots than blocks, to be looked at in more than one go.
    for number in range(5):
        toy.run(f"r{number}", STREAMS[number][:200])
    assert len(toy.host_slots) == 2 * 5 * (200 // BLOCK_SIZE)
    memory = toy.ranks.workers[rank].model._memory
    before = memory.copy()
    toy.ranks.check_host_slots(toy.host_slots)
    assert (memory == before).all()
    engine: Any = toy.ranks.gates[rank].engine
    engine._slots[77, "layer.2"][0, 0, 0] += 1
    with pytest.raises(AssertionError, match=f"slot 77 .* layer.2 on rank {rank}"):
        toy.ranks.check_host_slots(toy.host_slots)


def test_outside_the_window_nothing_is_read() -> None:
    toy = Toy(connector="null", shape=KVShape(sliding_window=40), num_blocks=200)
    toy.add("r", STREAMS[0][:200], max_tokens=30)
    toy.step(3)
    model = toy.ranks.workers[0].model
    row = model.rows["r"]
    assert 0 not in row.block_ids[0]
    # Position 202 is computed next: 163 is the first that it sees.
    windowed = next(layer for layer in model.layers if layer.group_id == 1)
    block_id = row.block_ids[1][162 // BLOCK_SIZE]
    windowed.blocks[block_id, 0, 162 % BLOCK_SIZE, 0] += 1
    toy.engine.step()
    windowed.blocks[row.block_ids[1][170 // BLOCK_SIZE], 0, 170 % BLOCK_SIZE, 0] += 1
    with pytest.raises(AssertionError, match="position 170"):
        toy.engine.step()


def test_saved_blocks_of_old_weights_are_noticed() -> None:
    toy = Toy()
    toy.run("save", STREAMS[0][:200])
    assert toy.scheduler.reset_prefix_cache()
    toy.ranks.reload_weights()
    with pytest.raises(AssertionError, match="wrong bytes"):
        toy.run("load", STREAMS[0][:200])


def test_new_weights_with_requests_running() -> None:
    toy = Toy(connector="null")
    toy.add("r", STREAMS[0][:100], max_tokens=30)
    toy.step(3)
    assert toy.scheduler.reset_prefix_cache(reset_running_requests=True)
    toy.ranks.reload_weights()
    toy.finish()
    assert toy.engine.outputs["r"] == expected_output("r", 100, 30)


# --- the rest of an executor ----------------------------------------------------------


def test_gates_hold_each_rank_by_itself() -> None:
    toy = Toy(gate=GatePlan(hold=True), tensor_parallel_size=2)
    toy.add("save", STREAMS[0][:200])
    toy.step(4)
    first, second = toy.ranks.gates
    assert [len(gate.held) for gate in (first, second)] == [1, 1]
    assert first.release() == 1
    toy.step(3)
    assert toy.connector.has_pending_push_work()
    assert second.release(second.held[0].job_id) == 1
    toy.finish()
    assert not toy.connector.has_pending_push_work()


def test_held_jobs_end_in_any_order_and_keep_their_bytes_in_order() -> None:
    """A load that overtakes the save of its slots still finds the bytes."""
    toy = Toy(fault="early_hit", gate=GatePlan(hold=True))
    (gate,) = toy.ranks.gates
    toy.add("save", STREAMS[0][:200])
    toy.step(3)
    saved = toy.scheduler.kv_cache_manager.block_pool
    for block in list(saved.cached_block_hash_to_block._cache.values()):
        saved.evict_blocks({block.block_id})
    toy.add("load", STREAMS[0][:200])
    toy.step(3)
    assert [job.direction.value for job in gate.held] == ["store", "load"]
    gate.release(gate.held[1].job_id)
    toy.step(3)
    assert toy.engine.outputs["load"] == expected_output("load", 200, 1)
    toy.ranks.open()
    toy.finish()


def test_a_closed_gate_reports_what_it_held() -> None:
    toy = Toy(gate=GatePlan(hold=True))
    toy.add("save", STREAMS[0][:200])
    toy.step(3)
    (gate,) = toy.ranks.gates
    gate.close()
    (result,) = gate.poll()
    assert result.error == "closed"
    assert gate.num_in_flight == 0


def test_workers_shake_hands_with_the_scheduler() -> None:
    toy = Toy(tensor_parallel_size=2, pipeline_parallel_size=2)
    handshake = toy.connector.handshake
    assert {place: met.rank for place, met in handshake.items()} == {
        (0, 0): 0,
        (0, 1): 1,
        (1, 0): 2,
        (1, 1): 3,
    }


def test_the_report_is_one_for_all_ranks() -> None:
    toy = Toy(connector="null", tensor_parallel_size=2)
    toy.add("r", STREAMS[0][:40])
    output = toy.ranks(toy.scheduler.schedule())
    assert isinstance(output, KVConnectorOutput)
    assert output.is_empty()


def test_pages_are_what_they_should_be() -> None:
    toy = Toy(connector="null", shape=KVShape(layout="BLNHC"), tensor_parallel_size=2)
    request = make_request("r", STREAMS[0][:40])
    toy.scheduler.add_request(request)
    toy.step()
    for rank, worker in enumerate(toy.ranks.workers):
        pages = toy.ranks.expected_pages(request.block_hashes[1], rank)
        (cached,) = toy.scheduler.kv_cache_manager.block_pool.get_cached_block(
            request.block_hashes[1], [0]
        )
        assert list(pages) == ["layer.0", "layer.1"]
        for name, page in pages.items():
            assert worker.model.page(cached.block_id, name) == page


@pytest.mark.parametrize("gate", [None, GatePlan(), GatePlan(max_delay=3, seed=1)])
@pytest.mark.parametrize("options", ENGINES)
def test_driver_of_the_tier(options: dict[str, Any], gate: GatePlan | None) -> None:
    tokens = STREAMS[0][:160]
    with TieredDriver(gate=gate, **options) as driver:
        driver.run("a", tokens, agent_hint=hint("a", ttl=60), max_tokens=5)
        reply = driver.wait(
            "apply_edits",
            tenant="",
            session_id="a",
            edits=[{"type": "offload"}],
            wait_s=60,
        )
        assert [r["status"] for r in reply["result"]["results"]] == ["completed"]
        assert driver.scheduler.reset_prefix_cache()
        driver.add("b", tokens, agent_hint=hint("b", ttl=60), max_tokens=5)
        while not driver.engine.is_idle:
            driver.step()
        assert driver.engine.outputs["b"] == expected_output("b", 160, 5)
        assert driver.tier.stats()["external_hit_tokens"] >= 128
        driver.check_no_leak()


def test_driver_without_a_tier() -> None:
    with TieredDriver(host_bytes=None) as driver:
        driver.run("a", STREAMS[0][:160], agent_hint=hint("a", ttl=60))
        assert driver.tier is None
        assert not driver.ranks.gates
        driver.check_no_leak()
