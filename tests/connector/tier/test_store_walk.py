"""Two engines on one store that does as it pleases: anything, at any moment.

After every step every account must be right, and every block that a request reads,
could hit or could load must hold what its hash says, on every rank of either engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from sam_connector.core.clock import ManualClock
from tests.connector.copy_gate import GatePlan
from tests.connector.driving import TieredDriver
from tests.connector.test_interruptions import SESSIONS, add_and_abort
from tests.connector.tier import flaky_store
from tests.connector.tier.test_anything import compare_with_expected, reset_cache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

#: Bytes of a block of the default shape on one rank.
_BLOCK = 512

_STORE_ACCOUNTS = (
    "store_jobs_in_flight",
    "store_bytes_in_flight",
    "store_queued",
    "store_queued_bytes",
    "store_calls_open",
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(1_000.0)
    for module in ("vllm_adapter.host", "connector.tier.build"):
        monkeypatch.setattr(f"sam_connector.{module}.MonotonicClock", lambda: clock)
    return clock


def make_driver(
    rng: random.Random, mode: str, store: str, *, num_slots: int, blocks_per_value: int
) -> TieredDriver:
    num_ranks = 2 if mode in ("tp2", "pp2") else 1
    return TieredDriver(
        host_bytes=num_slots * _BLOCK * num_ranks,
        extra_config={
            "save_policy": rng.choice(["hinted", "all", "on_demand"]),
            "idle_ttl_s": 20,
            "store": store,
            "store_policy": rng.choice(["on_demand", "sessions"]),
            "store_value_bytes": blocks_per_value * _BLOCK,
            "store_timeout_s": 5,
            "store_load_timeout_s": rng.choice([0.4, 5]),
            "store_lookup_timeout_s": rng.choice([0, 0.05, 1]),
            "store_max_queued": rng.choice([4, 1_000]),
        },
        gate=GatePlan(
            max_delay=rng.choice([0, 3]),
            copy_at="either",
            shuffle=True,
            failure_rate=rng.choice([0.0, 0.05]),
            seed=rng.randrange(1_000),
        ),
        num_blocks=48,
        async_scheduling=mode == "async",
        tensor_parallel_size=2 if mode == "tp2" else 1,
        pipeline_parallel_size=2 if mode == "pp2" else 1,
        max_num_batched_tokens=96,
    )


def control_call(driver: TieredDriver, rng: random.Random, edits: list[str]) -> None:
    session_id = rng.choice(SESSIONS)
    target = {"tenant": "", "session_id": session_id}

    def edit(kind: str, **more: Any) -> None:
        [result] = driver.edit(session_id, {"type": kind, **more})
        if result["status"] == "accepted":
            edits.append(result["operation_id"])

    calls: list[tuple[float, Callable[[], object]]] = [
        (6, lambda: edit("offload")),
        (6, lambda: edit("prefetch")),
        (1, lambda: edit("evict")),
        (1, lambda: edit("evict", purge=True)),
        (1, lambda: driver.call("set_lease", ttl=rng.choice([0, 2, 30]), **target)),
        (0.5, lambda: driver.call("free_session", **target)),
        (1, lambda: driver.call("get_session", **target)),
        (1, lambda: driver.call("reset", keep_store=True)),
        (0.2, lambda: driver.call("reset")),
    ]
    weights, choices = zip(*calls, strict=True)
    rng.choices(choices, weights=weights)[0]()


def settle(driver: TieredDriver, clock: ManualClock) -> None:
    """Steps until nothing is owed to anybody, by the store either."""
    driver.ranks.open()
    deadline = time.monotonic() + 60
    while True:
        driver.step()
        clock.advance(0.02)
        stats = driver.call("get_stats")["result"]
        open_ = {name: stats[name] for name in _STORE_ACCOUNTS if stats[name]}
        if driver.engine.is_idle and not open_ and not stats["operations_open"]:
            return
        assert time.monotonic() < deadline, open_
        time.sleep(0.0005)


@pytest.mark.parametrize("mode", ["sync", "async", "tp2", "pp2"])
@pytest.mark.parametrize("trouble", [0.0, 0.08])
@pytest.mark.parametrize("seed", range(3))
def test_anything_with_a_store(
    seed: int, trouble: float, mode: str, clock: ManualClock
) -> None:
    flaky_store.register()
    rng = random.Random(f"{seed}/{trouble}/{mode}")
    store = f"flaky://{seed}-{trouble}-{mode}?seed={seed}&trouble={trouble}"
    # What is shared must be named alike: grouping is part of the fingerprint.
    num_slots, blocks_per_value = rng.choice([12, 60, 200]), rng.choice([1, 1, 3])
    drivers = [
        make_driver(
            rng, mode, store, num_slots=num_slots, blocks_per_value=blocks_per_value
        )
        for _ in "ab"
    ]
    # What a hash stands for is the same on both.
    drivers[1].ranks._marks = drivers[0].ranks._marks
    prompts: list[dict[str, tuple[list[int], int]]] = [{}, {}]
    edits: list[list[str]] = [[], []]
    try:
        for number in range(110):
            turn = rng.randrange(2)
            driver = drivers[turn]
            add_and_abort(driver, rng, f"r{number}", prompts[turn])
            if rng.random() < 0.03:
                reset_cache(driver, rng, may_preempt=mode in ("sync", "tp2"))
            if rng.random() < 0.6:
                control_call(driver, rng, edits[turn])
            clock.advance(rng.choice([0.0, 0.01, 0.1, 1.0]))
            for each in drivers:
                each.step(rng.randrange(4))
            if rng.random() < 0.3:
                time.sleep(0.003)  # the store's threads have their turn
        for turn, driver in enumerate(drivers):
            settle(driver, clock)
            compare_with_expected(driver, prompts[turn])
            for operation_id in edits[turn]:
                answer = driver.call(
                    "get_operation", tenant="", operation_id=operation_id
                )
                if answer["result"] is not None:
                    assert answer["result"]["status"] != "accepted", answer
            driver.check_no_leak()
            settle(driver, clock)
    finally:
        for driver in drivers:
            driver.close()
