"""What makes bytes mean something else is in their name."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine_config import KVShape
from benchmarks.scheduler_harness import make_scheduler
from sam_connector.core.types import GroupId
from sam_connector.vllm_adapter.fingerprint import fingerprint

pytestmark = pytest.mark.vllm


class Engine:
    """What a fingerprint is taken of; parts may be replaced."""

    def __init__(self, **options: Any) -> None:
        shape = options.pop("shape", KVShape())
        options.setdefault("block_size", 16)
        scheduler = make_scheduler("sam", num_blocks=16, kv_shape=shape, **options)
        self.cache = scheduler.kv_cache_config
        real = scheduler.vllm_config
        # Copies, so that one test's changes are its own.
        self.config: Any = SimpleNamespace(
            model_config=copy.copy(real.model_config),
            cache_config=copy.copy(real.cache_config),
            parallel_config=copy.copy(real.parallel_config),
        )
        scheduler.shutdown()

    def name(self, namespace: str = "", blocks_per_value: int = 1) -> str:
        return fingerprint(
            self.config,
            self.cache,
            namespace=namespace,
            blocks_per_value={GroupId(0): blocks_per_value},
        )


def test_two_engines_that_are_alike_have_one_name() -> None:
    name = Engine().name()
    assert name == Engine().name()
    assert len(name) == 32
    int(name, 16)


@pytest.mark.parametrize(
    ("part", "attribute", "value"),
    [
        ("model_config", "model", "another/model"),
        ("model_config", "revision", "abc"),
        ("model_config", "dtype", "bfloat16"),
        ("model_config", "quantization", "fp8"),
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config", "tensor_parallel_size", 2),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "world_size", 2),
    ],
)
def test_h10_what_differs_has_another_name(
    part: str, attribute: str, value: object
) -> None:
    engine = Engine()
    before = engine.name()
    object.__setattr__(getattr(engine.config, part), attribute, value)
    assert engine.name() != before


def test_h10_geometry_is_in_the_name() -> None:
    names = {
        Engine().name(),
        Engine(block_size=32).name(),
        Engine(shape=KVShape(num_layers=4)).name(),
        Engine(shape=KVShape(num_kv_heads=4)).name(),
        Engine(shape=KVShape(head_size=16)).name(),
    }
    assert len(names) == 5


def test_h10_so_is_how_positions_are_encoded() -> None:
    engine = Engine()
    before = engine.name()
    engine.config.model_config.hf_config = SimpleNamespace(
        to_dict=lambda: {"rope_theta": 500_000}
    )
    assert engine.name() != before


def test_an_operator_and_the_grouping_have_a_say() -> None:
    engine = Engine()
    names = {engine.name(), engine.name("v2"), engine.name(blocks_per_value=2)}
    assert len(names) == 3


def test_h06_hashes_with_a_random_seed_are_not_shared_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    engine = Engine()
    object.__setattr__(engine.config.cache_config, "prefix_caching_hash_algo", "xxhash")
    with caplog.at_level(logging.WARNING, logger="sam_connector"):
        assert engine.name() != engine.name()
    assert "PYTHONHASHSEED" in caplog.text


def test_h06_with_a_seed_of_the_operator_s_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    object.__setattr__(engine.config.cache_config, "prefix_caching_hash_algo", "xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    name = engine.name()
    assert engine.name() == name
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert engine.name() != name
