"""Where blocks lie, and which models a tier cannot hold."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine_config import KVShape
from benchmarks.scheduler_harness import make_scheduler
from sam_connector.connector.worker import _region
from sam_connector.vllm_adapter.geometry import (
    RegionSpec,
    record_bytes,
    region_specs,
    why_not_holdable,
)
from tests.connector.kv_model import RankModel

pytestmark = pytest.mark.vllm

SHAPES = [
    KVShape(),
    KVShape(num_layers=3),
    KVShape(mla=True),
    KVShape(num_full_groups=2),
    KVShape(num_layers=3, layout="BLNHC", num_kv_heads=2),
    KVShape(num_full_groups=2, layout="BLNHC"),
    KVShape(layout="LHBNC", num_kv_heads=2),
    KVShape(num_full_groups=2, layout="LHBNC", num_kv_heads=3),
    KVShape(layout="BLHNC", num_kv_heads=2),
    KVShape(sliding_window=32),
]


def cache_of(shape: KVShape) -> Any:
    return make_scheduler(kv_shape=shape, num_blocks=9).kv_cache_config


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_is_what_its_layers_have_of_it_and_nothing_else(
    shape: KVShape,
) -> None:
    cache = cache_of(shape)
    model = RankModel(cache, 0)
    specs = region_specs(cache)
    for group_id, group in enumerate(cache.kv_cache_groups):
        regions = [
            _region(model.kv_caches[spec.layer], spec, cache.num_blocks)
            for spec in specs[group_id]  # type: ignore[index]
        ]
        own = [layer for layer in model.layers if layer.name in group.layer_names]
        for block_id in range(cache.num_blocks):
            model._memory[:] = 0
            for region in regions:
                region[block_id] = 1
            num_marked = int(model._memory.sum())
            pages = [model.page(block_id, layer.name) for layer in own]
            assert all(set(page) == {1} for page in pages)
            assert num_marked == sum(map(len, pages))
            assert num_marked == record_bytes(specs[group_id])  # type: ignore[index]


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_blocks_do_not_overlap(shape: KVShape) -> None:
    for specs in region_specs(cache_of(shape)).values():
        starts = sorted(
            (spec.start + block_id * spec.stride, spec.block_bytes)
            for spec in specs
            for block_id in range(9)
        )
        for (start, size), (following, _) in itertools.pairwise(starts):
            assert start + size <= following


def test_a_packed_block_is_one_piece() -> None:
    packed = region_specs(cache_of(KVShape(num_layers=3, layout="BLNHC")))
    apart = region_specs(cache_of(KVShape(num_layers=3)))
    assert [len(specs) for specs in packed.values()] == [1]
    assert [len(specs) for specs in apart.values()] == [3]


def test_a_record_is_the_sum_of_its_pieces() -> None:
    specs = [
        RegionSpec(layer="l", start=0, stride=64, block_bytes=size) for size in (64, 32)
    ]
    assert record_bytes(specs) == 96
    assert record_bytes([]) == 0


# --- what cannot be held ----------------------------------------------------


def reason(scheduler: Any, cache: Any = None, **changed: Any) -> str | None:
    config = copy.copy(scheduler.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    for name, value in changed.items():
        setattr(config.parallel_config, name, value)
    return why_not_holdable(
        config, cache or scheduler.kv_cache_config, scheduler.kv_cache_manager
    )


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_full_attention_and_latents_can_be_held(shape: KVShape) -> None:
    assert reason(make_scheduler(kv_shape=shape, num_blocks=9)) is None


def test_a_sliding_window_cannot() -> None:
    scheduler = make_scheduler(kv_shape=KVShape(sliding_window=32), num_blocks=9)
    assert reason(scheduler) == "it has a KV cache group of kind SlidingWindowSpec"


def test_a_kind_of_attention_that_is_not_known_cannot() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class NovelSpec(FullAttentionSpec):
        pass

    scheduler = make_scheduler(num_blocks=9)
    cache = copy.deepcopy(scheduler.kv_cache_config)
    spec = cache.kv_cache_groups[0].kv_cache_spec
    novel = NovelSpec(
        block_size=spec.block_size, num_kv_heads=1, head_size=2, dtype=torch.float32
    )
    cache.kv_cache_groups[0].kv_cache_spec = novel
    assert reason(scheduler, cache) == "it has a KV cache group of kind NovelSpec"


def test_context_parallel_decoding_cannot() -> None:
    assert "context parallelism" in str(
        reason(make_scheduler(num_blocks=9), decode_context_parallel_size=2)
    )


def test_a_cache_that_lies_on_the_host_cannot() -> None:
    scheduler = make_scheduler(num_blocks=9)
    cache = copy.deepcopy(scheduler.kv_cache_config)
    cache.kv_cache_tensors[0].host_resident = True
    assert "host memory already" in str(reason(scheduler, cache))


def test_a_cache_whose_place_is_not_known_cannot() -> None:
    scheduler = make_scheduler(num_blocks=9)
    cache = copy.deepcopy(scheduler.kv_cache_config)
    cache.kv_cache_tensors.clear()
    assert "does not say where" in str(reason(scheduler, cache))


def test_a_group_with_a_pool_of_its_own_cannot() -> None:
    scheduler = make_scheduler(kv_shape=KVShape(num_full_groups=2), num_blocks=9)
    manager: Any = scheduler.kv_cache_manager
    other = SimpleNamespace(block_pool=object())
    managers = manager.coordinator.single_type_managers
    manager.coordinator.single_type_managers = (managers[0], other)
    assert "block pool of its own" in str(reason(scheduler))
    assert (
        why_not_holdable(scheduler.vllm_config, scheduler.kv_cache_config, None) is None
    )
