"""Whether an engine gets a tier, and of what size."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from benchmarks.engine_config import KVShape
from benchmarks.scheduler_harness import make_scheduler
from sam_connector.config import HostTierConfig
from sam_connector.connector.tier.build import build_host_tier
from sam_connector.connector.tier.host_tier import HostTier
from sam_connector.core.types import GroupId

pytestmark = pytest.mark.vllm

#: Of the default shape on one rank: two layers, keys and values, 16 tokens.
RECORD = 512


def build(
    host_bytes: int = 100 * RECORD,
    *,
    share: float = 0.5,
    num_slots: int | None = None,
    settings: dict[str, Any] | None = None,
    caching: bool = True,
    **options: Any,
) -> HostTier | None:
    options.setdefault("num_blocks", 40)
    scheduler = make_scheduler(**options)
    scheduler.kv_cache_manager.enable_caching = caching
    return build_host_tier(
        scheduler.vllm_config,
        scheduler.kv_cache_config,
        scheduler.kv_cache_manager,
        HostTierConfig(host_bytes=host_bytes, **settings or {}),
        max_protected_fraction=share,
        num_slots=num_slots,
    )


def built(*args: Any, **more: Any) -> HostTier:
    tier = build(*args, **more)
    assert tier is not None
    return tier


@pytest.mark.parametrize(
    ("host_bytes", "options", "num_slots"),
    [
        (100 * RECORD, {}, 100),
        (100 * RECORD + RECORD - 1, {}, 100),
        (100 * RECORD, {"tensor_parallel_size": 2}, 50),
        (100 * RECORD, {"kv_shape": KVShape(num_layers=4)}, 50),
        (100 * RECORD, {"kv_shape": KVShape(num_full_groups=2)}, 100),
        # 48 tokens of 5 elements: no multiple of the alignment.
        (10 * 1024, {"kv_shape": KVShape(num_layers=1, head_size=1)}, 80),
    ],
)
def test_the_ranks_share_the_memory_and_each_holds_its_part_of_a_block(
    host_bytes: int, options: dict[str, Any], num_slots: int
) -> None:
    assert built(host_bytes, **options).stats()["host_slots"] == num_slots


def test_what_the_ranks_have_room_for_is_what_counts() -> None:
    tier = built(num_slots=7)
    assert tier.stats()["host_slots"] == 7
    assert tier.state.contexts._retention._max_protected == 3


def test_a_block_has_the_bytes_of_all_ranks() -> None:
    tier = built(tensor_parallel_size=2)
    assert tier.state.block_bytes == {GroupId(0): 2 * RECORD}
    assert tier.state.jobs.num_ranks == 2


@pytest.mark.parametrize(
    ("max_inflight_bytes", "num_blocks", "expected"),
    [(1 << 30, 40, 10), (5 * RECORD, 40, 5), (1, 40, 1), (1 << 30, 2, 1)],
)
def test_copies_hold_a_quarter_of_the_engines_blocks_at_most(
    max_inflight_bytes: int, num_blocks: int, expected: int
) -> None:
    tier = built(
        settings={"max_inflight_bytes": max_inflight_bytes}, num_blocks=num_blocks
    )
    assert tier.state.max_inflight_blocks == expected


def test_the_budget_in_bytes_is_that_of_all_ranks() -> None:
    tier = built(settings={"max_inflight_bytes": 8 * RECORD}, tensor_parallel_size=2)
    assert tier.state.max_inflight_blocks == 4


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "expected"),
    [(32, 40, 4), (33, 40, 6), (8_192, 40, 20)],
)
def test_demotion_stays_two_steps_ahead_within_half_of_the_pool(
    num_tokens: int, num_blocks: int, expected: int
) -> None:
    tier = built(max_num_batched_tokens=num_tokens, num_blocks=num_blocks)
    assert tier._saver._window == expected


@pytest.mark.parametrize(
    ("host_bytes", "caching"), [(0, True), (100 * RECORD, False), (RECORD - 1, True)]
)
def test_without_memory_or_prefix_caching_there_is_none(
    host_bytes: int, caching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sam_connector"):
        assert build(host_bytes, caching=caching) is None
    assert "host tier" not in caplog.text


def test_a_model_that_it_cannot_hold_is_served_without_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "sam_connector"):
        assert build(sliding_window=32) is None
    said = [r.getMessage() for r in caplog.records if r.name.startswith("sam_")]
    assert said == [
        "this model is served without the host tier: "
        "it has a KV cache group of kind SlidingWindowSpec"
    ]
