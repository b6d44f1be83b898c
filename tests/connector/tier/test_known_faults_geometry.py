"""Faults of group I, J and K: ranks, layers and blocks of every form."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from benchmarks.engine_config import KVShape, vllm_config
from benchmarks.scheduler_harness import expected_output, make_request
from sam_connector import SAMConnector
from sam_connector.config import HostTierConfig
from sam_connector.connector.worker import WorkerSide
from sam_connector.transfer.contract import CopyJob, Direction, GroupCopy
from tests.connector.driving import STREAMS, TieredDriver
from tests.connector.tier.situations import (
    LOAD,
    MODES,
    connector_of,
    finish,
    jobs_of,
    lose_engine_cache,
    run,
    saving,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

NUM_BLOCKS = 12

FULL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "dtype": torch.float32}


def full(head_size: int, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**(FULL | {"head_size": head_size} | more))


def latent(head_size: int, **more: Any) -> MLAAttentionSpec:
    dims = FULL | {"num_kv_heads": 1, "head_size": head_size} | more
    return MLAAttentionSpec(**dims)


MODELS: dict[str, dict[str, KVCacheSpec]] = {
    "MHA": {f"layer.{i}": full(8, num_kv_heads=8) for i in range(3)},
    "GQA": {f"layer.{i}": full(8, num_kv_heads=1) for i in range(3)},
    "MLA": {f"layer.{i}": latent(576) for i in range(3)},
    "MLA and indexer": {
        name: spec
        for i in range(2)
        for name, spec in (
            (f"layer.{i}", latent(576)),
            (f"layer.{i}.indexer", latent(132, dtype=torch.uint8)),
        )
    },
    "two head sizes": {f"layer.{i}": full(256 + 256 * (i % 2)) for i in range(4)},
    "8 bits": {f"layer.{i}": full(16, dtype=torch.uint8) for i in range(3)},
    "16 bits": {f"layer.{i}": full(16, dtype=torch.bfloat16) for i in range(3)},
    "base and draft": {
        "layer.0": full(8),
        "layer.1": full(8),
        "draft.0": full(8, num_kv_heads=2),
    },
}


def geometry(layers: Mapping[str, KVCacheSpec], layout: str) -> KVCacheConfig:
    config = vllm_config(
        connector="sam",
        block_size=16,
        async_scheduling=False,
        extra_config={"host_bytes": 1 << 22},
        max_model_len=1_024,
        max_num_seqs=8,
        max_num_batched_tokens=1_024,
    )
    config = copy.copy(config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    specs = list(layers.values())
    spec = (
        specs[0]
        if all(s == specs[0] for s in specs)
        else UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(layers))
    )
    group = KVCacheGroupSpec(list(layers), spec)
    cache = get_kv_cache_config_from_groups(config, [group], 1 << 30)
    cache.kv_cache_layout = layout
    assert cache.num_blocks == NUM_BLOCKS
    return cache


LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"]

#: With heads outside of layers or blocks vLLM wants layers that are all alike.
FORMS = [
    (model, layout)
    for model, layers in MODELS.items()
    for layout in LAYOUTS
    if layout.index("H") > 1 or len(set(map(str, layers.values()))) == 1
]


@pytest.mark.parametrize(("model", "layout"), FORMS)
@pytest.mark.parametrize("seed", range(2))
def test_j04_j09_j13_k07_blocks_come_back_whatever_their_form(
    seed: int, model: str, layout: str
) -> None:
    """Sizes and strides from the memory itself, in no particular order of layers."""
    cache = geometry(MODELS[model], layout)
    kv_caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
    shuffled = list(kv_caches.items())
    random.Random(seed).shuffle(shuffled)
    assert set(kv_caches) == set(MODELS[model])
    for memory in kv_caches.values():
        as_bytes(memory).random_(0, 256)
    original = {name: memory.clone() for name, memory in kv_caches.items()}
    sources, slots, targets = [3, 7, 1, 5], [4, 0, 9, 2], [8, 2, 6, 11]
    with worker(dict(shuffled), cache) as side:
        copy_now(side, Direction.STORE, sources, slots)
        for memory in kv_caches.values():
            as_bytes(memory).random_(0, 256)
        untouched = {name: raw(memory[4]) for name, memory in kv_caches.items()}
        copy_now(side, Direction.LOAD, targets, slots)
        for name, memory in kv_caches.items():
            for source, target in zip(sources, targets, strict=True):
                wanted = raw(original[name][source])
                assert raw(memory[target]).equal(wanted), (name, target)
            assert raw(memory[4]).equal(untouched[name]), name


def test_j09_a_record_is_the_same_whatever_the_order_of_the_layers() -> None:
    """Ranks, and a server that is started again, agree on what is where."""
    cache = geometry(MODELS["two head sizes"], "LBNHC")
    kv_caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.LBNHC)
    for memory in kv_caches.values():
        as_bytes(memory).random_(0, 256)
    records = []
    for names in (sorted(kv_caches), sorted(kv_caches, reverse=True)):
        with worker({name: kv_caches[name] for name in names}, cache) as side:
            copy_now(side, Direction.STORE, [5], [0])
            records.append(bytes(side.pool.slot(0)))
    assert records[0] == records[1]
    assert len(records[0]) >= 2 * 16 * 4 * (256 + 512) * 4 * 2


@contextlib.contextmanager
def worker(
    kv_caches: dict[str, torch.Tensor], cache: KVCacheConfig
) -> Iterator[WorkerSide]:
    """A worker side that is closed at the end."""
    config = HostTierConfig(host_bytes=1 << 23)
    side = WorkerSide(kv_caches, cache, config, rank=0, num_ranks=1)
    try:
        yield side
    finally:
        side.close()


def copy_now(
    side: WorkerSide, direction: Direction, block_ids: list[int], slots: list[int]
) -> None:
    side.engine.submit(CopyJob(1, direction, (GroupCopy(0, block_ids, slots),)))
    assert side.engine.drain(10)
    (result,) = side.engine.poll()
    assert result.error is None


def raw(block: torch.Tensor) -> torch.Tensor:
    """The values of a block, bit by bit: not every bit pattern equals itself."""
    return block.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def as_bytes(memory: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())


# --- ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("mla", [False, True], ids=["heads", "latents"])
@pytest.mark.parametrize("mode", ["tp4", "pp2"])
def test_i03_blocks_are_given_back_once_after_the_last_rank(
    mode: str, mla: bool
) -> None:
    """All ranks copy, those that hold the same latents as well; so all must report."""
    parallel = {
        "tp4": {"tensor_parallel_size": 4},
        "pp2": {"pipeline_parallel_size": 2},
    }
    shape = KVShape(mla=mla, head_size=4)
    plan: dict[str, Any] = {
        "shape": shape,
        "report_lag": {0: 2, 1: 4},
        **parallel[mode],
    }
    with saving(**plan) as driver:
        connector = connector_of(driver)
        assert connector.get_finished_count() is None
        unpinned: list[Any] = []
        gpu = driver.tier.state.gpu
        unpin = gpu.unpin

        def note(blocks: Any) -> None:
            unpinned.extend(blocks)
            unpin(blocks)

        gpu.unpin = note
        run(driver, "save", STREAMS[0][:160])
        assert len(unpinned) == len(set(map(id, unpinned))) == 10
        lose_engine_cache(driver)
        run(driver, "load", STREAMS[0][:160])
        assert driver.tier.stats()["external_hit_tokens"] == 144
        for gate in driver.ranks.gates:
            assert gate.history == driver.ranks.gates[0].history
        driver.check_no_leak()


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"), [(0, 1, 0), (3, 4, 3), (9, 4, 1), (9, 1, 0)]
)
def test_i07_a_rank_is_counted_within_its_engine(
    rank: int, world_size: int, expected: int
) -> None:
    """With data parallelism vLLM numbers the workers of all engines in one row."""
    driver = TieredDriver(tensor_parallel_size=world_size)
    with driver:
        chosen = driver.ranks.workers[0]
        chosen.config.parallel_config.rank = rank
        connector = chosen.connector
        connector.worker_side.close()
        connector.register_kv_caches(chosen.model.kv_caches)
        assert connector.worker_side._rank == expected
        # The device is that of the memory it is given, and never chosen.
        assert connector.worker_side.pool.tensor.device.type == "cpu"


@pytest.mark.parametrize("shape", [KVShape(), KVShape(num_layers=(3, 1))])
def test_i09_stages_of_a_pipeline(shape: KVShape) -> None:
    """The smaller stage decides how many slots there are; every step goes on."""
    with saving(shape=shape, pipeline_parallel_size=2, host_bytes=1 << 14) as driver:
        num_slots = [w.worker_side.pool.num_slots for w in driver.ranks.workers]
        assert driver.tier.stats()["host_slots"] == min(num_slots)
        run(driver, "save", STREAMS[0][:80], 3)
        lose_engine_cache(driver)
        run(driver, "load", STREAMS[0][:80], 3)
        assert driver.tier.stats()["external_hit_tokens"] == 64
        driver.check_no_leak()


# --- groups and block sizes -----------------------------------------------------------


def test_j01_the_hybrid_cache_manager_stays_on() -> None:
    assert issubclass(SAMConnector, SupportsHMA)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [40, 100])
def test_j03_two_turns_of_a_model_with_a_window(window: int, mode: str) -> None:
    """Served without the tier, which could not bring back what the window needs."""
    shape = KVShape(sliding_window=window)
    with TieredDriver(shape=shape, num_blocks=100, **MODES[mode]) as driver:
        assert driver.tier is None
        first = driver.run("turn 1", STREAMS[0][:200], max_tokens=9)
        turn = STREAMS[0][:200] + first + STREAMS[1][:50]
        request = driver.add("turn 2", turn, max_tokens=9)
        assert driver.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        for _ in range(60):
            driver.step()
        assert driver.engine.outputs["turn 2"] == expected_output("turn 2", 259, 9)
        assert not any(w.worker_side for w in driver.ranks.workers)
        driver.check_no_leak()


@pytest.mark.parametrize(
    "shape",
    [
        KVShape(layout="BLNHC"),
        KVShape(layout="LHBNC", num_kv_heads=2),
        KVShape(mla=True, head_size=4),
        KVShape(num_full_groups=2, layout="BLHNC", num_layers=3),
    ],
    ids=["packed", "heads apart", "latents", "two groups"],
)
@pytest.mark.parametrize("mode", MODES)
def test_j12_save_lose_and_load(mode: str, shape: KVShape) -> None:
    with saving(shape=shape, **MODES[mode]) as driver:
        run(driver, "save", STREAMS[0][:160], 20)
        lose_engine_cache(driver)
        run(driver, "load", STREAMS[0][:160], 20)
        assert driver.tier.stats()["external_hit_tokens"] == 144
        driver.check_no_leak()


@pytest.mark.parametrize("block_size", [16, 544, 1_568])
def test_j06_j07_any_block_size_and_prompts_of_every_length(block_size: int) -> None:
    """A slot holds one block, so that there is no other unit to divide by."""
    stream = random.Random(3).choices(range(32_000), k=4 * block_size)
    shape = KVShape(num_layers=1)
    sizes: dict[str, Any] = {"block_size": block_size, "host_bytes": 1 << 22}
    lengths: Sequence[int] = range(1, 3 * block_size + 2)
    if block_size > 16:
        rng = random.Random(block_size)
        edges = [n * block_size + d for n in (1, 2, 3) for d in (-1, 0, 1)]
        lengths = [1, *edges, *rng.sample(range(1, 3 * block_size), 6)]
    with saving(shape=shape, num_blocks=20, **sizes) as driver:
        for length in lengths:
            driver.tier.reset()
            for name in ("save", "load"):
                request = make_request(
                    f"{name}{length}", stream[:length], block_size=block_size
                )
                driver.scheduler.add_request(request)
                finish(driver)
                if name == "save":
                    lose_engine_cache(driver)
                    assert driver.tier.stats()["host_used_slots"] == (
                        length // block_size
                    )
                    num_loads = len(jobs_of(driver.ranks.gates[0], LOAD))
            loads = jobs_of(driver.ranks.gates[0], LOAD)[num_loads:]
            assert sum(len(p.slots) for j in loads for p in j.parts) == (
                (length - 1) // block_size
            )
            lose_engine_cache(driver)
        driver.check_no_leak()
