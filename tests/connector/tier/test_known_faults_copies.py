"""Faults of group G and L: what may change while a copy is under way."""

from __future__ import annotations

import random
from typing import Any

import pytest

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
    num_blocks,
    run,
    saved,
    saving,
    step,
    tier_has,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]

SESSIONS = [f"s{number}" for number in range(10)]


def offload(driver: TieredDriver, session_id: str = "s") -> dict[str, Any]:
    (result,) = driver.edit(session_id, {"type": "offload"})
    return result


def prefetch(driver: TieredDriver, session_id: str = "s") -> str:
    (result,) = driver.edit(session_id, {"type": "prefetch"})
    assert result["status"] == "accepted", result
    operation_id: str = result["operation_id"]
    return operation_id


def outcome(driver: TieredDriver, operation_id: str) -> dict[str, Any]:
    reply = driver.call("get_operation", tenant="", operation_id=operation_id)
    result: dict[str, Any] = reply["result"]
    return result


def in_the_tier_only(*session_ids: str, **options: Any) -> TieredDriver:
    """Sessions with ``PROMPT`` whose blocks are in the tier, leased."""
    driver = saved(**options)
    for session_id in session_ids:
        request = driver.add(f"r{session_id}", PROMPT, agent_hint=hint(session_id, 60))
        finish(driver)
        assert request.is_finished()
    for session_id in session_ids:
        offload(driver, session_id)
        finish(driver)
    # Sessions outlive it if nobody tells them of a reset.
    driver.pool.evict_blocks(set(driver.free_ids()))
    for gate in driver.ranks.gates:
        gate.history.clear()
    return driver


# --- a block is reused while it is saved ----------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_g03_blocks_are_not_reused_while_they_are_saved(mode: str) -> None:
    """64 prompts at once in a pool for 8, with copies that outlast many steps."""
    plan = GatePlan(max_delay=15, copy_at="release", shuffle=True, seed=5)
    with saving(num_blocks=66, gate=plan, **MODES[mode]) as driver:
        prompts = {
            f"r{n}": random.Random(n).choices(range(32_000), k=6 * BLOCK_SIZE + n)
            for n in range(64)
        }
        for request_id, prompt in prompts.items():
            driver.add(request_id, prompt, max_tokens=12)
        finish(driver)
        for request_id, prompt in prompts.items():
            assert_answered(driver, request_id, prompt, 12)
        assert len(jobs_of(driver.ranks.gates[0], STORE)) >= 10
        driver.check_no_leak()


def test_g04_a_store_under_way_keeps_its_blocks_from_everybody() -> None:
    """Whoever allocates: a request, a prefetch, another connector's load."""
    with saving(num_blocks=48) as driver:
        hold(driver)
        driver.add("r", PROMPT)
        step(driver, 4)
        (store,) = driver.ranks.gates[0].held
        kept = set(store.parts[0].block_ids)
        assert len(kept) == 10
        taken = driver.pool.get_new_blocks(driver.pool.get_num_free_blocks())
        assert not kept & {block.block_id for block in taken}
        # Requests that want more than is left wait; they take nothing of it.
        driver.pool.free_blocks(taken)
        driver.add("other", STREAMS[1][: 38 * BLOCK_SIZE])
        step(driver, 5)
        tables = driver.scheduler.kv_cache_manager.get_block_ids("other")
        assert not kept & {block_id for ids in tables for block_id in ids}
        driver.ranks.open()
        finish(driver)
        assert tier_has(driver, PROMPT) == 10
        driver.check_no_leak()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_g06_jobs_that_are_queued_when_a_worker_closes(num_ranks: int) -> None:
    """They end, as failed, on each rank; nothing of them becomes a hit."""
    with saving(tensor_parallel_size=num_ranks, num_blocks=140) as driver:
        hold(driver)
        driver.tier.state.max_inflight_blocks = 100
        for number in range(10):
            driver.add(f"r{number}", STREAMS[number % 6][number : number + 160])
        step(driver, 4)
        num_jobs = len(driver.ranks.gates[0].held)
        assert num_jobs >= 10
        for gate in driver.ranks.gates:
            gate.close()
        for gate in driver.ranks.gates[1:]:
            assert gate.history == driver.ranks.gates[0].history
        for _ in range(5):
            driver.engine.step()
        assert driver.tier.stats()["failed_copies"] == num_jobs
        assert driver.tier.stats()["host_used_slots"] == 0
        assert driver.tier.stats()["gpu_pinned_blocks"] == 0


# --- a slot is reused while it is read ------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async", "tp2"])
def test_g09_a_slot_is_not_given_up_while_it_is_loaded(mode: str) -> None:
    num_ranks = MODES[mode].get("tensor_parallel_size", 1)
    with saved(host_bytes=12 * 512 * num_ranks, **MODES[mode]) as driver:
        assert driver.tier.stats()["host_slots"] == 12
        hold(driver)
        driver.add("r", PROMPT, max_tokens=3)
        step(driver, 3)
        load = driver.ranks.gates[0].held[0]
        assert load.direction is LOAD
        # Much more than fits is saved meanwhile.
        for gate in driver.ranks.gates:
            gate.is_holding = False
        for number in range(1, 5):
            driver.add(f"o{number}", STREAMS[number][:160])
            step(driver, 6)
        stores = jobs_of(driver.ranks.gates[0], STORE)[1:]
        assert stores
        read = set(load.parts[0].slots)
        for job in stores:
            assert not read.intersection(job.parts[0].slots)
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "r", PROMPT, 3)
        driver.check_no_leak()


# --- two want the same blocks ---------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async", "tp2"])
@pytest.mark.parametrize("steps_before", range(3))
@pytest.mark.parametrize("released_after", range(3))
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "computes"])
def test_g10_a_request_computes_what_is_being_prefetched(
    waits: bool, released_after: int, steps_before: int, mode: str
) -> None:
    settings = {} if waits else {"max_load_wait_s": 0}
    with in_the_tier_only("s", extra_config=settings, **MODES[mode]) as driver:
        hold(driver)
        operation_id = prefetch(driver)
        step(driver, steps_before)
        request = driver.add("r", PROMPT, max_tokens=5)
        request.skip_reading_prefix_cache = not waits
        step(driver, released_after)
        check_owners(driver)
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "r", PROMPT, 5)
        result = outcome(driver, operation_id)
        assert result["status"] == "completed"
        assert len(driver.resident(request)) == 10
        driver.check_no_leak()


def check_owners(driver: TieredDriver) -> None:
    """Nobody else has a block that something is being loaded into."""
    loading = {
        block_id
        for job in driver.ranks.gates[0].held
        for part in job.parts
        for block_id in part.block_ids
    }
    for block_id in loading:
        assert driver.pool.blocks[block_id].ref_cnt == 1
    for request in driver.scheduler.running:
        tables = driver.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        assert not loading.intersection(*map(set, tables))


@pytest.mark.parametrize("first_ends", ["well", "badly", "evicted", "freed"])
@pytest.mark.parametrize("mode", ["sync", "async", "tp2"])
def test_g15_ten_sessions_prefetch_one_prefix_at_once(
    mode: str, first_ends: str
) -> None:
    with in_the_tier_only(*SESSIONS, **MODES[mode]) as driver:
        hold(driver)
        operation_ids = [prefetch(driver, session_id) for session_id in SESSIONS]
        step(driver, 2)
        gate = driver.ranks.gates[0]
        loaded = [s for j in jobs_of(gate, LOAD) for p in j.parts for s in p.slots]
        assert len(loaded) == len(set(loaded)) == 10
        if first_ends == "evicted":
            driver.edit(SESSIONS[0], {"type": "evict"})
        elif first_ends == "freed":
            driver.call("free_session", tenant="", session_id=SESSIONS[0])
        step(driver, 2)
        for gate in driver.ranks.gates:
            gate.release(error="broken" if first_ends == "badly" else None)
        driver.ranks.open()
        finish(driver)
        for operation_id in operation_ids[1:]:
            expected = "rejected" if first_ends == "badly" else "completed"
            assert outcome(driver, operation_id)["status"] == expected
        # Whatever became of the prefetches, requests are answered.
        run(driver, "r", PROMPT, 3)
        assert num_blocks(jobs_of(driver.ranks.gates[0], LOAD)) == 10
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first_ends", ["well", "badly", "aborted"])
def test_g15_ten_requests_of_one_prefix_load_it_once(
    first_ends: str, mode: str
) -> None:
    with saved(num_blocks=180, **MODES[mode]) as driver:
        hold(driver)
        prompts = {f"r{n}": PROMPT + STREAMS[1 + n % 5][n : n + 30] for n in range(10)}
        for request_id, prompt in prompts.items():
            driver.add(request_id, prompt, max_tokens=5)
        step(driver, 3)
        gate = driver.ranks.gates[0]
        assert num_blocks(jobs_of(gate, LOAD)) == 10
        if first_ends == "aborted":
            driver.engine.abort("r0")
            step(driver, 2)
        for gate in driver.ranks.gates:
            gate.release(error="broken" if first_ends == "badly" else None)
        driver.ranks.open()
        finish(driver)
        for request_id, prompt in list(prompts.items())[first_ends == "aborted" :]:
            assert_answered(driver, request_id, prompt, 5)
        num_loaded = num_blocks(jobs_of(driver.ranks.gates[0], LOAD))
        assert num_loaded == {"well": 10, "badly": 10, "aborted": 20}[first_ends]
        driver.check_no_leak()


# --- what is said to be saved ---------------------------------------------------------


@pytest.mark.parametrize("steps_between", range(3))
@pytest.mark.parametrize("mode", MODES)
def test_g12_the_next_turn_comes_before_the_save_has_ended(
    mode: str, steps_between: int
) -> None:
    with saving("on_demand", num_blocks=24, **MODES[mode]) as driver:
        hold(driver)
        edit = {"context_management": {"edits": [{"type": "offload"}]}}
        driver.add("turn 1", PROMPT, max_tokens=3, agent_hint=hint("s", 60, **edit))
        while "turn 1" not in driver.engine.finished:
            step(driver)
        step(driver, steps_between)
        turn = PROMPT + driver.engine.outputs["turn 1"] + STREAMS[1][:20]
        request = driver.add("turn 2", turn, max_tokens=3, agent_hint=hint("s", 60))
        driver.edit("s", {"type": "prefetch"})
        step(driver, 6)
        # It does not wait for the copy, and uses what the engine still has.
        assert driver.engine.outputs["turn 2"]
        assert not jobs_of(driver.ranks.gates[0], LOAD)
        assert request.num_preemptions == 0
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "turn 2", turn, 3)
        assert tier_has(driver, PROMPT) == 10
        driver.check_no_leak()


@pytest.mark.parametrize("mode", ["sync", "async", "tp2", "pp2"])
def test_g13_the_engine_lets_go_once_every_rank_has_saved(mode: str) -> None:
    with saving("on_demand", **MODES[mode]) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        hold(driver)
        driver.tier.state.max_inflight_blocks = 4
        result = offload(driver)
        assert result["status"] == "accepted"
        # Block by block as far as the budget goes, and leased until the last is safe.
        for _ in range(3):
            step(driver, 3)
            for gate in driver.ranks.gates:
                assert driver.manager.stats().protected_blocks == 10
                assert outcome(driver, result["operation_id"])["status"] == "accepted"
                assert gate.release() == 1
                step(driver, 1)
        driver.ranks.open()
        finish(driver)
        ended = outcome(driver, result["operation_id"])
        assert ended["status"] == "completed"
        assert ended["blocks"]["done"] == 10
        assert driver.manager.stats().protected_blocks == 0
        assert tier_has(driver, PROMPT) == 10
        driver.check_no_leak()


def test_g13_a_conversation_that_goes_on_is_saved_from_its_beginning() -> None:
    """What was saved first is displaced first, and the turns after it need it."""
    turn_1 = PROMPT[: 8 * BLOCK_SIZE]
    turn_2 = turn_1 + STREAMS[1][: 4 * BLOCK_SIZE]
    turn_3 = turn_2 + STREAMS[2][: 4 * BLOCK_SIZE]
    with saving(host_bytes=20 * 512) as driver:
        run(driver, "turn 1", turn_1)
        run(driver, "other 1", STREAMS[3][: 8 * BLOCK_SIZE])
        run(driver, "turn 2", turn_2)
        run(driver, "other 2", STREAMS[4][: 6 * BLOCK_SIZE])
        assert tier_has(driver, turn_1) < 8
        run(driver, "turn 3", turn_3)
        assert tier_has(driver, turn_3) == 16
        driver.check_no_leak()


def test_g18_completed_means_that_all_of_it_can_be_read() -> None:
    with saving("on_demand", tensor_parallel_size=2) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        gate_plan = GatePlan(max_delay=7, shuffle=True)
        for gate in driver.ranks.gates:
            gate.plan = gate_plan
        result = offload(driver)
        num_had = []
        while outcome(driver, result["operation_id"])["status"] == "accepted":
            num_had.append(tier_has(driver, PROMPT))
            step(driver)
        assert tier_has(driver, PROMPT) == len(contents_of(driver, PROMPT)) == 10
        assert 10 not in num_had[:-1]
        driver.check_no_leak()


# --- a pool, and a tier, that are too small -------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_l01_prefetches_yield_to_requests(mode: str) -> None:
    """They keep nothing once they have ended, and take no more than the reserve."""
    prompts = {f"s{n}": STREAMS[n][: 25 * BLOCK_SIZE] for n in range(3)}
    with saved(num_blocks=28, **MODES[mode]) as driver:
        for session_id, prompt in prompts.items():
            driver.run(session_id, prompt, agent_hint=hint(session_id, ttl=60))
        hold(driver)
        operation_ids = [prefetch(driver, session_id) for session_id in prompts]
        driver.add("first", STREAMS[4][: 20 * BLOCK_SIZE], max_tokens=40)
        step(driver, 4)
        for number in range(4):
            driver.add(f"r{number}", STREAMS[5][number : number + 160], max_tokens=9)
        step(driver, 4)
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "first", STREAMS[4][: 20 * BLOCK_SIZE], 40)
        for number in range(4):
            assert_answered(driver, f"r{number}", STREAMS[5][number : number + 160], 9)
        for operation_id in operation_ids:
            assert outcome(driver, operation_id)["status"] != "accepted"
        assert driver.tier.stats()["gpu_pinned_blocks"] == 0
        driver.check_no_leak()


@pytest.mark.parametrize("policy", ["all", "hinted"])
@pytest.mark.parametrize("mode", MODES)
def test_l04_a_tier_of_one_slot(mode: str, policy: str) -> None:
    num_ranks = 2 if mode in ("tp2", "pp2") else 1
    options = {"host_bytes": 512 * num_ranks, "num_blocks": 30, **MODES[mode]}
    with saving(policy, **options) as driver:
        assert driver.tier.stats()["host_slots"] == 1
        for number in range(50):
            prompt = STREAMS[number % 6][number : number + 20 * BLOCK_SIZE]
            session = hint(f"s{number % 7}", ttl=60)
            driver.run(f"r{number}", prompt, max_tokens=2, agent_hint=session)
            assert driver.tier.stats()["host_used_slots"] <= 1
            offload(driver, f"s{number % 7}")
        finish(driver)
        assert num_blocks(jobs_of(driver.ranks.gates[0], STORE))
        driver.check_no_leak()
