"""While no session exists, the order of evictions is vLLM's own."""

from __future__ import annotations

import random

import pytest

from tests.connector.driving import STREAMS, Driver

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_reuse_blocks_in_the_same_order(
    seed: int, async_scheduling: bool
) -> None:
    """Requests, aborts and resets at random, on a pool too small for them."""
    options = {"num_blocks": 40, "async_scheduling": async_scheduling}
    stock, ours = Driver("null", **options), Driver("sam", **options)
    rng = random.Random(seed)
    for number in range(60):
        action = rng.random()
        if action < 0.5:
            stream, length = rng.choice(STREAMS), rng.randrange(1, 320)
            max_tokens = rng.randrange(1, 40)
            for driver in (stock, ours):
                driver.add(f"r{number}", stream[:length], max_tokens=max_tokens)
        elif action < 0.6 and stock.scheduler.requests:
            victim = rng.choice(sorted(stock.scheduler.requests))
            for driver in (stock, ours):
                driver.engine.abort(victim)
        elif action < 0.65:
            outcomes = {
                driver.scheduler.reset_prefix_cache() for driver in (stock, ours)
            }
            assert len(outcomes) == 1
        for _ in range(rng.randrange(6)):
            for driver in (stock, ours):
                driver.engine.step()
            assert stock.free_ids() == ours.free_ids()
    for driver in (stock, ours):
        driver.engine.run_until_idle()
    assert stock.engine.outputs == ours.engine.outputs
    assert stock.free_ids() == ours.free_ids()
    ours.check_no_leak()


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_hints_change_nothing_unless_sam_is_on(mode: str) -> None:
    stock = Driver("null", num_blocks=40)
    ours = Driver("sam", num_blocks=40, extra_config={"sam": mode})
    rng = random.Random(1)
    for number in range(40):
        stream, length = rng.choice(STREAMS), rng.randrange(1, 320)
        hint = {"session_id": f"s{number % 5}", "cache_control": {"ttl": 60}}
        stock.add(f"r{number}", stream[:length], max_tokens=3)
        ours.add(f"r{number}", stream[:length], max_tokens=3, agent_hint=hint)
        for driver in (stock, ours):
            driver.engine.run_until_idle()
        assert stock.free_ids() == ours.free_ids()
    if mode == "shadow":
        ours.check()
        assert ours.manager.stats().leases_granted > 0
