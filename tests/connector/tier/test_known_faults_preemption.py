"""Faults of group F and K: preemption, chunks, decoded tokens, a pool that is full."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sam_connector import SAMConnector
from sam_connector.connector import facade
from tests.connector.copy_gate import GatePlan
from tests.connector.driving import BLOCK_SIZE, STREAMS, TieredDriver, hint
from tests.connector.tier.situations import (
    LOAD,
    MODES,
    PROMPT,
    STORE,
    assert_answered,
    contents_of,
    finish,
    hold,
    jobs_of,
    lose_engine_cache,
    num_blocks,
    run,
    saved,
    saving,
    step,
    tier_has,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


def finish_counting_preemptions(driver: TieredDriver) -> int:
    most: dict[str, int] = {}
    for _ in range(5_000):
        if driver.engine.is_idle:
            return sum(most.values())
        step(driver)
        for request in driver.scheduler.requests.values():
            most[request.request_id] = request.num_preemptions
    raise AssertionError("never idle")


def preempt(driver: TieredDriver, request_id: str) -> None:
    """As the scheduler does for want of blocks; others then take them."""
    scheduler: Any = driver.scheduler
    request = scheduler.requests[request_id]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    scheduler.prev_step_scheduled_req_ids.discard(request_id)


# --- F --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["all", "hinted"])
def test_f01_preempted_while_its_blocks_are_being_saved(policy: str, mode: str) -> None:
    """Copies that take long, and a pool in which nobody keeps its blocks."""
    plan = GatePlan(max_delay=9, copy_at="either", shuffle=True, seed=3)
    driver = saving(
        policy,
        num_blocks=30,
        gate=plan,
        host_bytes=1 << 17,
        max_num_batched_tokens=64,
        **MODES[mode],
    )
    with driver:
        prompts = {f"r{n}": STREAMS[n % 4][: 90 + 7 * n] for n in range(12)}
        for number, (request_id, prompt) in enumerate(prompts.items()):
            session = hint(f"s{number % 4}", ttl=60)
            driver.add(request_id, prompt, max_tokens=70, agent_hint=session)
            step(driver, 3)
        assert finish_counting_preemptions(driver)
        assert jobs_of(driver.ranks.gates[0], STORE)
        for request_id, prompt in prompts.items():
            assert_answered(driver, request_id, prompt, 70)
        driver.check_no_leak()


def test_f01_what_is_still_being_saved_is_no_hit() -> None:
    """Three stores of its blocks are under way when a request comes back."""
    with saving("on_demand") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        hold(driver)
        driver.tier.state.max_inflight_blocks = 10
        driver.edit("s", {"type": "offload"})
        step(driver, 2)
        assert len(driver.ranks.gates[0].held) == 1
        # The engine keeps what is copied, so nothing else could be wrong with it.
        assert not driver.scheduler.reset_prefix_cache()
        driver.pool.evict_blocks({b.block_id for b in driver.pool.blocks[1:]})
        driver.add("again", PROMPT, max_tokens=5)
        for _ in range(4):
            step(driver)
        assert not jobs_of(driver.ranks.gates[0], LOAD)
        assert driver.engine.outputs["again"]
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "again", PROMPT, 5)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", ["sync", "tp2", "pp2"])
def test_f03_copies_follow_the_tables_of_the_scheduler(mode: str) -> None:
    """Nothing of ours keeps a block table that could lag behind after a preemption."""
    rng = random.Random(7)
    prompts = {f"r{n}": STREAMS[n][: 60 + 20 * n] for n in range(5)}
    with saved(*prompts.values(), num_blocks=50, **MODES[mode]) as driver:
        for request_id, prompt in prompts.items():
            driver.add(request_id, prompt, max_tokens=60, agent_hint=hint(request_id))
        for _ in range(20):
            step(driver, rng.randrange(1, 4))
            while driver.engine.in_flight:
                driver.engine.complete_oldest()
            running = [r.request_id for r in driver.scheduler.running]
            if running:
                preempt(driver, rng.choice(running))
                if rng.random() < 0.5:
                    driver.pool.evict_blocks(set(driver.free_ids()))
        finish(driver)
        for request_id, prompt in prompts.items():
            assert_answered(driver, request_id, prompt, 60)
        assert len(jobs_of(driver.ranks.gates[0], LOAD)) > len(prompts)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [16, 20, 48])
def test_f04_a_prompt_in_chunks_is_saved_as_a_whole(budget: int, mode: str) -> None:
    prompt = STREAMS[1][: 24 * BLOCK_SIZE + 3]
    with saving(max_num_batched_tokens=budget, **MODES[mode]) as driver:
        # Less at a time than there is to save: several stores of one request.
        driver.tier.state.max_inflight_blocks = 3
        run(driver, "save", prompt, 2)
        assert len(jobs_of(driver.ranks.gates[0], STORE)) == 8
        assert tier_has(driver, prompt) == 24
        lose_engine_cache(driver)
        run(driver, "load", prompt, 2)
        assert driver.tier.stats()["external_hit_tokens"] == 24 * BLOCK_SIZE
        driver.check_no_leak()


@pytest.mark.parametrize("mode", ["sync", "tp2"])
def test_f06_a_resumed_request_finds_what_it_had_decoded(mode: str) -> None:
    prompt, decoded = PROMPT, 3 * BLOCK_SIZE + 2
    with saving(**MODES[mode]) as driver:
        # The same id is answered with the same tokens, which are saved with it.
        run(driver, "r", prompt, decoded)
        assert tier_has(driver, prompt) == 10
        lose_engine_cache(driver)
        driver.add("r", prompt, max_tokens=decoded)
        driver.engine.outputs.clear()
        request = driver.scheduler.requests["r"]
        while request.num_tokens < len(prompt) + 3 * BLOCK_SIZE + 1:
            step(driver)
        before = driver.tier.stats()["external_hit_tokens"]
        assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
        finish(driver)
        assert request.num_preemptions == 1
        loaded = driver.tier.stats()["external_hit_tokens"] - before
        assert loaded == 13 * BLOCK_SIZE
        assert_answered(driver, "r", prompt, decoded)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", ["sync", "tp2", "pp2"])
@pytest.mark.parametrize("steps_after", range(4))
@pytest.mark.parametrize("is_half_loaded", [False, True])
def test_f07_preempted_around_a_load(
    is_half_loaded: bool, steps_after: int, mode: str
) -> None:
    """Preempted right after its load, which may have stopped half-way before."""
    with saved(**MODES[mode]) as driver:
        if is_half_loaded:
            driver.ranks.gates[-1].fail_next()
        driver.add("r", PROMPT, max_tokens=20)
        request = driver.scheduler.requests["r"]
        while request not in driver.scheduler.running:
            step(driver)
        step(driver, steps_after)
        while driver.engine.in_flight:
            driver.engine.complete_oldest()
        preempt(driver, "r")
        driver.scheduler.reset_prefix_cache()
        finish(driver)
        assert request.num_preemptions == 1
        assert_answered(driver, "r", PROMPT, 20)
        # Half of a load is none; a whole one is done again, for the new blocks.
        assert len(jobs_of(driver.ranks.gates[0], LOAD)) == (1 if is_half_loaded else 2)
        driver.check_no_leak()


# --- K --------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 3], ids=["", "drafter"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [1, 60])
@pytest.mark.parametrize("at_once", [False, True])
def test_k03_two_full_hits_that_fill_the_pool(
    at_once: bool, max_tokens: int, mode: str, lookahead: int
) -> None:
    first = STREAMS[0][: 16 * BLOCK_SIZE]
    second = STREAMS[1][: 15 * BLOCK_SIZE]
    with saved(first, second, num_blocks=32, **MODES[mode]) as driver:
        with_drafter(driver, lookahead)
        hold(driver)
        driver.add("a", first, max_tokens=max_tokens)
        step(driver, 0 if at_once else 2)
        driver.add("b", second, max_tokens=max_tokens)
        step(driver, 3)
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "a", first, max_tokens)
        assert_answered(driver, "b", second, max_tokens)
        assert driver.tier.stats()["external_hit_requests"] >= 2
        driver.check_no_leak()


def with_drafter(driver: TieredDriver, num_tokens: int) -> None:
    """A drafter that never proposes: room for its tokens is made all the same."""
    driver.scheduler.num_lookahead_tokens = num_tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lookahead", [3, 40])
@pytest.mark.parametrize("length", [33, 160, 175])
def test_k01_hits_with_room_made_for_drafts(
    length: int, lookahead: int, mode: str
) -> None:
    prompt = STREAMS[0][:length]
    with saving(**MODES[mode]) as driver:
        with_drafter(driver, lookahead)
        run(driver, "save", prompt, 20)
        lose_engine_cache(driver)
        run(driver, "load", prompt, 20)
        hit = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert driver.tier.stats()["external_hit_tokens"] == hit
        driver.check_no_leak()


def test_k04_nothing_is_done_layer_by_layer() -> None:
    """So no hook needs to run when a captured graph is replayed."""
    assert not SAMConnector.requires_piecewise_for_cudagraph({})
    for method in (SAMConnector.wait_for_layer_load, SAMConnector.save_kv_layer):
        assert method.__module__ == facade.__name__
        assert method.__code__.co_names == ()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [8_192, 24])
def test_k06_decoded_blocks_are_saved(budget: int, mode: str) -> None:
    num_decoded = 10 * BLOCK_SIZE
    with saving(max_num_batched_tokens=budget, **MODES[mode]) as driver:
        run(driver, "r", PROMPT[:64], num_decoded + 2)
        turn = PROMPT[:64] + driver.engine.outputs["r"]
        # The last token was sampled and never computed.
        assert tier_has(driver, turn) == (64 + num_decoded) // BLOCK_SIZE
        lose_engine_cache(driver)
        run(driver, "next turn", [*turn, *STREAMS[2][:20]])
        assert driver.tier.stats()["external_hit_tokens"] == 64 + num_decoded
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
def test_k06_decoded_blocks_of_a_session_are_saved_before_they_are_lost(
    mode: str,
) -> None:
    num_decoded = 10 * BLOCK_SIZE
    options = {"num_blocks": 32, "max_num_batched_tokens": 24, **MODES[mode]}
    with saving("hinted", **options) as driver:
        driver.run("r", PROMPT[:64], max_tokens=num_decoded + 2, agent_hint=hint("s"))
        turn = PROMPT[:64] + driver.engine.outputs["r"]
        run(driver, "other", STREAMS[1][: 25 * BLOCK_SIZE])
        request = driver.add("next turn", [*turn, *STREAMS[2][:20]])
        num_local = local_hit(driver, request)
        finish(driver)
        num_external = driver.tier.stats()["external_hit_tokens"]
        assert num_external
        assert num_local + num_external == 64 + num_decoded
        driver.check_no_leak()


def local_hit(driver: TieredDriver, request: Any) -> int:
    manager = driver.scheduler.kv_cache_manager
    return int(manager.get_computed_blocks(request)[1])


def test_k06_nothing_sampled_and_not_computed_is_saved() -> None:
    """With two batches in flight the last block may be named and not yet written."""
    for num_decoded in range(BLOCK_SIZE - 2, BLOCK_SIZE + 3):
        with saving(async_scheduling=True) as driver:
            run(driver, "r", PROMPT, num_decoded)
            whole = PROMPT + driver.engine.outputs["r"]
            num_computed = len(whole) - 1
            assert len(contents_of(driver, whole)) == len(whole) // BLOCK_SIZE
            assert tier_has(driver, whole) == num_computed // BLOCK_SIZE
            stores = jobs_of(driver.ranks.gates[0], STORE)
            assert num_blocks(stores) == num_computed // BLOCK_SIZE
            driver.check_no_leak()
