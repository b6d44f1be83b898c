"""Faults of group C, G and I: copies that fail, and content that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.engine_config import KVShape
from benchmarks.scheduler_harness import expected_output
from sam_connector.connector.metadata import RankResult, WorkerReport
from sam_connector.transfer.contract import CopyJob
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
    matched,
    on_allocation,
    run,
    saved,
    saving,
    step,
    tier_has,
    waiting_request,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

RANKS: dict[str, dict[str, Any]] = {
    "one": {},
    "async": {"async_scheduling": True},
    "tp4": {"tensor_parallel_size": 4},
    "pp2": {"pipeline_parallel_size": 2},
}


def fail_next_copy(driver: TieredDriver, rank: int) -> None:
    driver.ranks.gates[rank].fail_next()


# --- C: a hit that was promised and is not there --------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [0, 5, 8])
def test_c01_content_is_gone_between_look_up_and_load(mode: str, index: int) -> None:
    with saved(**MODES[mode]) as driver:
        gone = contents_of(driver, PROMPT)[index]
        on_allocation(driver, lambda: driver.tier.state.slots.forget(gone))
        driver.add("r", PROMPT, max_tokens=3)
        finish(driver)
        assert driver.tier.stats()["failed_loads"] == 1
        assert_answered(driver, "r", PROMPT, 3)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", RANKS)
def test_c03_an_idle_engine_goes_on_when_a_load_fails(
    mode: str,
) -> None:
    with saved(**RANKS[mode]) as driver:
        driver.ranks.gates[-1].fail_next(1_000)
        driver.add("r", PROMPT, max_tokens=3)
        finish(driver, max_steps=20)
        # The load, and the save that followed.
        assert driver.tier.stats()["failed_copies"] == 2
        assert_answered(driver, "r", PROMPT, 3)
        # Not offered again to whoever comes next.
        lose_engine_cache(driver)
        assert matched(driver, waiting_request(PROMPT)) == (0, False)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_failures", [1, 2, 3])
def test_c04_requests_that_share_what_fails_to_load(
    mode: str, num_failures: int
) -> None:
    first, second = PROMPT, STREAMS[1][: 8 * BLOCK_SIZE]
    with saved(first, second, **MODES[mode]) as driver:
        prompts = {
            "a": first + STREAMS[2][:40],
            "b": first + STREAMS[3][:25],
            "c": second + STREAMS[2][:20],
            "d": second + STREAMS[3][:70],
        }
        for gate in driver.ranks.gates:
            gate.fail_next(num_failures)
        for request_id, prompt in prompts.items():
            driver.add(request_id, prompt, max_tokens=20)
            step(driver)
        finish(driver)
        assert driver.tier.stats()["failed_copies"]
        for request_id, prompt in prompts.items():
            assert_answered(driver, request_id, prompt, 20)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", ["sync", "async", "tp2"])
def test_c06_a_failure_with_several_kv_cache_groups(mode: str) -> None:
    """vLLM ends the engine if blocks are named: requests must be."""
    with saved(shape=KVShape(num_full_groups=2), **MODES[mode]) as driver:
        for gate in driver.ranks.gates:
            gate.fail_next()
        driver.add("r", PROMPT, max_tokens=3)
        finish(driver)
        assert driver.tier.stats()["failed_copies"] == 1
        for worker in driver.ranks.workers:
            assert worker.connector.get_block_ids_with_load_errors() == set()
        assert_answered(driver, "r", PROMPT, 3)
        driver.check_no_leak()


@pytest.mark.parametrize("num_raising", [1, 3])
def test_c07_a_copy_that_cannot_be_submitted_has_failed(
    num_raising: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: CopyJob) -> None:
        raise RuntimeError("the queue is closed")

    with saved(tensor_parallel_size=3) as driver:
        for gate in driver.ranks.gates[:num_raising]:
            monkeypatch.setattr(gate, "submit", refuse)
        driver.add("r", PROMPT, max_tokens=3, agent_hint=hint("s", ttl=60))
        finish(driver, max_steps=50)
        assert_answered(driver, "r", PROMPT, 3)
        (result,) = driver.edit("s", {"type": "offload"})
        assert result["status"] == "accepted"
        finish(driver, max_steps=50)
        assert driver.tier.stats()["failed_copies"] >= 2
        driver.check_no_leak()


@pytest.mark.parametrize("held", [False, True], ids=["before", "while it is read"])
def test_c10_content_is_forgotten_behind_the_back_of_a_load(held: bool) -> None:
    with saved() as driver:
        if held:
            hold(driver)
        slots = driver.tier.state.slots
        contents = contents_of(driver, PROMPT)
        if not held:
            slots.forget(contents[3])
            assert matched(driver, waiting_request(PROMPT)) == (48, True)
        driver.add("r", PROMPT, max_tokens=3)
        step(driver, 3)
        for content in contents:
            slots.forget(content)
            slots.forget(content)
        step(driver, 2)
        assert tier_has(driver, PROMPT) == 0 or not held
        driver.ranks.open()
        finish(driver)
        assert_answered(driver, "r", PROMPT, 3)
        driver.check_no_leak()


# --- G: stores that fail --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["one", "tp4", "pp2"])
@pytest.mark.parametrize("num_copied", [0, 1, 9])
def test_g07_a_store_that_fails_after_some_blocks_is_not_there(
    mode: str, num_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving("on_demand", **RANKS[mode]) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        monkeypatch.setattr(
            "tests.connector.copy_gate._first_half", first_blocks(num_copied)
        )
        fail_next_copy(driver, len(driver.ranks.gates) - 1)
        reply = driver.wait(
            "apply_edits",
            tenant="",
            session_id="s",
            edits=[{"type": "offload"}],
            wait_s=60,
        )
        (result,) = reply["result"]["results"]
        assert result["status"] == "rejected"
        assert "failed on purpose" in result["reason"]
        # The engine's copy is kept and leased: it is the only one.
        assert driver.manager.stats().protected_blocks == 10
        assert tier_has(driver, PROMPT) == 0
        assert driver.tier.stats()["host_used_slots"] == 0
        lose_engine_cache(driver)
        assert matched(driver, waiting_request(PROMPT)) == (0, False)
        run(driver, "again", PROMPT)
        driver.check_no_leak()


def first_blocks(num_copied: int) -> Callable[[CopyJob], CopyJob]:
    def cut(job: CopyJob) -> CopyJob:
        parts = tuple(
            type(part)(
                part.group_id, part.block_ids[:num_copied], part.slots[:num_copied]
            )
            for part in job.parts
        )
        return CopyJob(job.job_id, job.direction, parts)

    return cut


def test_g07_a_policy_save_that_fails_is_not_there() -> None:
    with saving(gate=GatePlan(fail={0: [0]})) as driver:
        run(driver, "r", PROMPT)
        assert driver.tier.stats()["failed_copies"] == 1
        assert tier_has(driver, PROMPT) == 0
        run(driver, "again", PROMPT)
        assert tier_has(driver, PROMPT) == 10
        driver.check_no_leak()


@pytest.mark.parametrize("num_lost", [1, 5, 9])
def test_g07_what_lost_its_beginning_is_saved_again(num_lost: int) -> None:
    """Given up for other content, or forgotten after a load that failed."""
    with saved() as driver:
        for content in contents_of(driver, PROMPT)[:num_lost]:
            driver.tier.state.slots.forget(content)
        run(driver, "again", PROMPT)
        assert tier_has(driver, PROMPT) == 10
        lose_engine_cache(driver)
        assert matched(driver, waiting_request(PROMPT)) == (144, True)
        driver.check_no_leak()


# --- I: ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("bad_rank", range(4))
def test_i01_a_hit_is_what_every_rank_has(bad_rank: int) -> None:
    """One rank lost its share of the second half; nobody is promised that half."""
    half = PROMPT[: 5 * BLOCK_SIZE]
    with saving(tensor_parallel_size=4) as driver:
        run(driver, "half", half)
        fail_next_copy(driver, bad_rank)
        run(driver, "whole", PROMPT)
        assert tier_has(driver, PROMPT) == 5
        lose_engine_cache(driver)
        assert matched(driver, waiting_request(PROMPT)) == (5 * BLOCK_SIZE, True)
        driver.add("r", PROMPT)
        finish(driver)
        loads = [jobs_of(gate, LOAD) for gate in driver.ranks.gates]
        assert loads == [loads[0]] * 4
        driver.check_no_leak()


@pytest.mark.parametrize("bad_rank", range(4))
def test_i01_a_load_that_fails_on_one_rank_fails_on_all(bad_rank: int) -> None:
    with saved(
        tensor_parallel_size=4, report_lag={0: 3, 2: 1}, async_scheduling=True
    ) as driver:
        fail_next_copy(driver, bad_rank)
        driver.add("r", PROMPT, max_tokens=3)
        finish(driver)
        assert driver.engine.outputs["r"] == expected_output("r", len(PROMPT), 3)
        assert driver.tier.stats()["failed_copies"] == 1
        driver.check_no_leak()


def test_i04_a_job_is_over_once_every_rank_has_said_so() -> None:
    with saving(tensor_parallel_size=3) as driver:
        hold(driver)
        driver.add("r", PROMPT)
        step(driver, 4)
        # Two ranks, in different steps; one of them twice, one that is not known.
        for gate in driver.ranks.gates[:2]:
            gate.release()
            step(driver, 3)
        (job_id,) = driver.tier.state.jobs.open_jobs()
        side = driver.side
        side.on_report(WorkerReport(frozenset({RankResult(0, job_id, None)})))
        side.on_report(WorkerReport(frozenset({RankResult(1, job_id, "late")})))
        side.on_report(WorkerReport(frozenset({RankResult(0, 99, None)})))
        assert driver.tier.stats()["late_reports"] == 3
        assert tier_has(driver, PROMPT) == 0
        assert driver.tier.stats()["gpu_pinned_blocks"] == 10
        driver.ranks.open()
        finish(driver)
        assert tier_has(driver, PROMPT) == 10
        (store,) = jobs_of(driver.ranks.gates[2], STORE)
        assert store.job_id == job_id
        driver.check_no_leak()
