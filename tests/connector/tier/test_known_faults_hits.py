"""Faults of group A, B and E: how many tokens are claimed, and what a look-up does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.engine_config import KVShape
from sam_connector.transfer.contract import GroupCopy
from tests.connector.driving import BLOCK_SIZE, STREAMS, TieredDriver
from tests.connector.tier.situations import (
    LOAD,
    MODES,
    PROMPT,
    account,
    assert_answered,
    connector_of,
    finish,
    hold,
    jobs_of,
    lose_engine_cache,
    matched,
    num_blocks,
    run,
    run_without_tier,
    saved,
    saving,
    step,
    waiting_request,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

LONG = STREAMS[1][: 12 * BLOCK_SIZE + 5]
TWO_GROUPS = KVShape(num_full_groups=2)


def spy_on_allocations(driver: TieredDriver) -> list[tuple[list[int], int]]:
    """Block ids of the first group and external tokens of each allocation."""
    told: list[tuple[list[int], int]] = []
    connector = connector_of(driver)
    update = connector.update_state_after_alloc

    def update_and_tell(request: Any, blocks: Any, num_external_tokens: int) -> None:
        told.append((list(blocks.get_block_ids()[0]), num_external_tokens))
        update(request, blocks, num_external_tokens)

    connector.update_state_after_alloc = update_and_tell
    return told


# --- A: the claim ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [KVShape(), TWO_GROUPS], ids=["one", "two"])
@pytest.mark.parametrize("more", [-1, 0, 1, BLOCK_SIZE - 1])
def test_a01_a_claim_leaves_a_token_to_compute(shape: KVShape, more: int) -> None:
    with saved(LONG, shape=shape) as driver:
        for num_whole in range(1, 13):
            num_tokens = num_whole * BLOCK_SIZE + more
            request = waiting_request(LONG[:num_tokens])
            for computed in range(0, num_tokens + 1, BLOCK_SIZE):
                claim, is_async = matched(driver, request, computed)
                assert claim == max(
                    0, (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE - computed
                )
                assert computed + claim < max(num_tokens, computed + 1)
                assert is_async == (claim > 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_local", [0, 1, 4, 9])
def test_a03_claim_allocation_and_copies_are_one_range(
    mode: str, num_local: int
) -> None:
    with saved(**MODES[mode]) as driver:
        if num_local:
            run_without_tier(driver, "local", PROMPT[: num_local * BLOCK_SIZE])
        told = spy_on_allocations(driver)
        num_before = len(jobs_of(driver.ranks.gates[0], LOAD))
        driver.add("load", PROMPT)
        finish(driver)
        (ids, external) = told[0]
        assert external == (9 - num_local) * BLOCK_SIZE
        for gate in driver.ranks.gates:
            loads = jobs_of(gate, LOAD)[num_before:]
            assert [list(part.block_ids) for job in loads for part in job.parts] == (
                [ids[num_local:]] if external else []
            )
        assert len(ids) == (9 if external else 10)
        driver.check_no_leak()


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE])
def test_a04_a_prompt_of_a_block_or_less_is_not_looked_up(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved() as driver:
        slots = driver.tier.state.slots
        monkeypatch.setattr(type(slots), "__contains__", None)
        assert matched(driver, waiting_request(PROMPT[:num_tokens])) == (0, False)
        monkeypatch.undo()
        one_more = waiting_request(PROMPT[: BLOCK_SIZE + 1])
        assert matched(driver, one_more) == (BLOCK_SIZE, True)
        assert matched(driver, waiting_request([])) == (0, False)
        for length in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1):
            run(driver, f"r{length}", PROMPT[:length])
        driver.check_no_leak()


def test_a06_a_tier_that_has_less_than_the_engine_claims_nothing() -> None:
    with saved(PROMPT[: 2 * BLOCK_SIZE]) as driver:
        request = waiting_request(PROMPT)
        before = account(driver)
        for computed in range(2, 11):
            assert matched(driver, request, computed * BLOCK_SIZE) == (0, False)
        assert account(driver) == before
        # The same through the scheduler: admitted in the very step it came in.
        driver.tier.reset()
        run(driver, "local", PROMPT)
        driver.tier.reset()
        driver.add("r", PROMPT, max_tokens=3)
        step(driver)
        assert driver.engine.outputs["r"]
        finish(driver)
        assert not jobs_of(driver.ranks.gates[0], LOAD)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
def test_a07_asked_fifty_times_one_load(mode: str) -> None:
    with saved(**MODES[mode]) as driver:
        hold(driver)
        before = account(driver)
        request = waiting_request(PROMPT)
        assert {matched(driver, request) for _ in range(50)} == {(144, True)}
        assert account(driver) == before
        waiting = driver.add("r", PROMPT, max_tokens=2)
        step(driver, 3)
        blocks = driver.scheduler.kv_cache_manager.get_blocks("r")
        connector = connector_of(driver)
        connector.update_state_after_alloc(waiting, blocks, 0)
        step(driver, 3)
        for gate in driver.ranks.gates:
            assert [job.direction for job in gate.held] == [LOAD]
        stats = driver.tier.stats()
        assert stats["jobs_in_flight"] == 1
        assert stats["host_pinned_slots"] == 9
        assert stats["external_hit_requests"] == 1
        assert stats["external_hit_tokens"] == 144
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "r", PROMPT, 2)
        # Admitted again with what was loaded: nothing is loaded a second time.
        assert len(jobs_of(driver.ranks.gates[0], LOAD)) == 1
        driver.check_no_leak()


@pytest.mark.parametrize("shape", [KVShape(), TWO_GROUPS], ids=["one", "two"])
def test_a09_any_local_hit_with_any_part_of_the_prompt_in_the_tier(
    shape: KVShape,
) -> None:
    """A load starts at the first block that the engine has not."""
    rng = random.Random(0)
    with saved(LONG, shape=shape, num_blocks=120) as driver:
        contents = list(driver.tier.state.slots.contents())
        for number in range(25):
            run(driver, f"save-again{number}", LONG)
            lose_engine_cache(driver)
            for content in rng.sample(contents, rng.randrange(4)):
                driver.tier.state.slots.forget(content)
            num_local = rng.randrange(0, 13)
            cold = LONG[: num_local * BLOCK_SIZE]
            if cold:
                run(driver, f"local{number}", cold)
            told = spy_on_allocations(driver)
            run(driver, f"load{number}", LONG[: rng.randrange(1, len(LONG))], 3)
            ids, external = told[0]
            loads = jobs_of(driver.ranks.gates[0], LOAD)
            if external:
                for part in loads[-1].parts:
                    assert len(part.block_ids) == external // BLOCK_SIZE
                assert list(loads[-1].parts[0].block_ids) == ids[-external // 16 :]
        driver.check_no_leak()


@pytest.mark.parametrize("settled", [5, 2, 0, 8])
def test_a10_what_is_loaded_follows_from_the_allocation(settled: int) -> None:
    """The look-up saw a local hit of 3 blocks, the scheduler settled on another."""
    with saved() as driver:
        request = driver.add("r", PROMPT)
        assert matched(driver, request, 3 * BLOCK_SIZE) == (6 * BLOCK_SIZE, True)
        assert not driver.tier.stats()["jobs_in_flight"]
        manager = driver.scheduler.kv_cache_manager
        blocks = manager.block_pool.get_new_blocks(9)
        ids = [block.block_id for block in blocks]
        connector = connector_of(driver)
        wrapped = type("Blocks", (), {"get_block_ids": lambda _: (ids,)})()
        connector.update_state_after_alloc(request, wrapped, (9 - settled) * BLOCK_SIZE)
        (job,) = connector.build_connector_meta(None).jobs
        slots = driver.tier.state.slots
        chain = driver.tier._chains.hashes(request, 0)
        assert job.parts == (
            GroupCopy(
                group_id=0,
                block_ids=ids[settled:],
                slots=[slots.get((0, h)).index for h in chain[settled:9]],
            ),
        )


# --- B: requests that must not read ---------------------------------------------------


def test_b01_a_request_that_must_not_read_a_cache_computes_everything() -> None:
    with saved() as driver:
        run(driver, "local", PROMPT[: 4 * BLOCK_SIZE])
        before = driver.tier.stats()
        request = driver.add("r", PROMPT, max_tokens=3)
        request.skip_reading_prefix_cache = True
        scheduled = 0
        scheduler: Any = driver.scheduler
        schedule = scheduler.schedule

        def count() -> Any:
            nonlocal scheduled
            output = schedule()
            scheduled += output.num_scheduled_tokens.get("r", 0)
            return output

        scheduler.schedule = count
        unchanged = account(driver)
        assert matched(driver, request) == (0, False)
        assert account(driver) == unchanged
        finish(driver)
        assert scheduled >= len(PROMPT)
        assert_answered(driver, "r", PROMPT, 3)
        assert driver.tier.stats() == before
        driver.check_no_leak()


def test_b03_requests_that_must_not_read_are_in_no_count() -> None:
    with saved() as driver:
        run(driver, "reads", PROMPT)
        lose_engine_cache(driver)
        before = driver.tier.stats()
        assert before["external_hit_requests"] == 1
        for number in range(5):
            request = driver.add(f"r{number}", PROMPT)
            request.skip_reading_prefix_cache = True
        finish(driver)
        assert driver.tier.stats() == before
        driver.check_no_leak()


# --- E: pins --------------------------------------------------------------------------


def test_e12_a_look_up_that_is_followed_by_no_load_holds_nothing() -> None:
    with saved(num_blocks=24) as driver:
        before = account(driver)
        # Only looked up; never scheduled.
        for _ in range(100):
            assert matched(driver, waiting_request(PROMPT))[0] == 144
        assert account(driver) == before

        # Allocation fails: somebody has the pool. Then the client leaves.
        driver.add("big", STREAMS[2][: 15 * BLOCK_SIZE], max_tokens=60)
        driver.step(2)
        driver.add("r", PROMPT)
        driver.step(5)
        assert driver.tier.stats()["host_pinned_slots"] == 0
        driver.engine.abort("r")
        driver.step(2)
        assert driver.tier.stats()["host_pinned_slots"] == 0
        assert "r" not in driver.scheduler.requests
        driver.engine.abort("big")
        finish(driver)

        # The engine has it all by itself.
        run(driver, "local", PROMPT)
        num_loads = len(jobs_of(driver.ranks.gates[0], LOAD))
        run(driver, "again", PROMPT)
        assert len(jobs_of(driver.ranks.gates[0], LOAD)) == num_loads
        assert driver.tier.stats()["host_pinned_slots"] == 0
        driver.check_no_leak()


def test_e12_a_tier_that_saves_nothing_pins_nothing() -> None:
    with saving("on_demand") as driver:
        run(driver, "r", PROMPT)
        run(driver, "again", PROMPT)
        assert num_blocks(driver.ranks.gates[0].history) == 0
        driver.check_no_leak()
