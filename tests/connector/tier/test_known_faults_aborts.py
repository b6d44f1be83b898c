"""Faults of group E: requests that leave, and what was under way for them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.connector.driving import BLOCK_SIZE, STREAMS, TieredDriver, hint
from tests.connector.test_multi_connector import child
from tests.connector.tier.situations import (
    LOAD,
    MODES,
    PROMPT,
    STORE,
    account,
    assert_answered,
    connector_of,
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
    waiting_request,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

MULTI = (
    "MultiConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)


def reports_of(driver: TieredDriver) -> Counter[str]:
    """Counts what the scheduler is told to have been received or sent."""
    told: Counter[str] = Counter()
    scheduler: Any = driver.scheduler
    update = scheduler._update_from_kv_xfer_finished

    def count(output: Any) -> None:
        told.update(output.finished_recving or ())
        told.update(f"sent {r}" for r in output.finished_sending or ())
        update(output)

    scheduler._update_from_kv_xfer_finished = count
    return told


def answers_of(driver: TieredDriver) -> list[tuple[str, bool]]:
    """Request ids, and whether their blocks are to be kept, as they finish."""
    answers: list[tuple[str, bool]] = []
    connector = connector_of(driver)
    finished = connector.request_finished_all_groups

    def tell(request: Any, block_ids: Any) -> tuple[bool, Any]:
        delayed, params = finished(request, block_ids)
        answers.append((request.request_id, delayed))
        return delayed, params

    connector.request_finished_all_groups = tell
    return answers


def abort_now(driver: TieredDriver, request_id: str) -> None:
    driver.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


# --- E01, E15: nothing was computed ---------------------------------------------------


@pytest.mark.parametrize("policy", ["all", "hinted"])
@pytest.mark.parametrize("looked_up", [False, True])
def test_e01_aborted_before_it_was_scheduled(policy: str, looked_up: bool) -> None:
    with saved() if policy == "all" else saving(policy) as driver:
        before = driver.tier.stats()
        for gate in driver.ranks.gates:
            gate.history.clear()
        request = driver.add("r", PROMPT, agent_hint=hint("s", ttl=60))
        if looked_up:
            matched(driver, request)
        abort_now(driver, "r")
        step(driver, 3)
        assert not driver.ranks.gates[0].history
        assert driver.tier.stats() == before
        reply = driver.call("get_session", tenant="", session_id="s")
        contexts = (reply["result"] or {}).get("contexts", [])
        assert sum(context["num_blocks"] for context in contexts) == 0
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
def test_e15_no_request_keeps_its_blocks_when_it_ends(mode: str) -> None:
    """Nothing computed, less than a block, all of it saved already, much to save."""
    with saved(**MODES[mode]) as driver:
        answers, told = answers_of(driver), reports_of(driver)
        driver.add("nothing", PROMPT)
        abort_now(driver, "nothing")
        run(driver, "part of a block", STREAMS[1][:5])
        run(driver, "all saved", PROMPT)
        run(driver, "much to save", STREAMS[2][: 20 * BLOCK_SIZE], 30)
        hold(driver)
        driver.add("while loading", PROMPT)
        lose_engine_cache(driver)
        step(driver, 3)
        abort_now(driver, "while loading")
        driver.ranks.open()
        finish(driver)
        assert len(answers) == 5
        assert not any(delayed for _, delayed in answers)
        # Received by those that loaded; nothing is ever sent.
        assert set(told) <= {"all saved", "while loading"}
        driver.check_no_leak()


# --- E03, E04, E13: a load that ends after its request --------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [None, "broken"], ids=["ends well", "fails"])
@pytest.mark.parametrize("steps_later", [1, 2, 100])
def test_e03_a_load_that_ends_after_its_request(
    steps_later: int, error: str | None, mode: str
) -> None:
    with saved(**MODES[mode]) as driver:
        told = reports_of(driver)
        hold(driver)
        driver.add("r", PROMPT, max_tokens=3)
        step(driver, 3)
        assert driver.ranks.gates[0].held
        for _ in range(2):
            driver.engine.abort("r")
            step(driver, 2)
        abort_now(driver, "r")
        for _ in range(steps_later):
            # Its blocks are kept from everybody: bytes may still land in them.
            assert driver.pool.get_num_free_blocks() == 63 - 9
            driver.engine.step()
        for gate in driver.ranks.gates:
            gate.release(error=error)
            step(driver, 2)
        step(driver, 4)
        assert told == {"r": 1}
        assert "r" not in driver.scheduler.requests
        driver.check_no_leak()


@pytest.mark.parametrize("error", [None, "broken"], ids=["ends well", "fails"])
@pytest.mark.parametrize(
    "order", list(itertools.permutations(["complete", "abort", "reset"])), ids="-".join
)
def test_e13_no_order_of_ends_unpins_twice(
    order: tuple[str, ...], error: str | None
) -> None:
    with saved() as driver:
        hold(driver)
        driver.add("r", PROMPT, max_tokens=40)
        step(driver, 3)
        slots = driver.tier.state.slots
        ends: dict[str, Callable[[], object]] = {
            "complete": lambda: driver.ranks.gates[0].release(error=error),
            "abort": lambda: abort_now(driver, "r"),
            "reset": lambda: connector_of(driver).reset_cache(),
        }
        for name in order:
            ends[name]()
            step(driver)
            assert min(slot.num_pins for slot in slots.blocks) >= 0
        driver.ranks.open()
        finish(driver)
        assert not any(slot.num_pins for slot in slots.blocks)
        with pytest.raises(AssertionError, match="not pinned"):
            slots.unpin(slots.blocks[1:2])
        driver.check_no_leak()


# --- E06: one report for one load -----------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async", "tp2"])
@pytest.mark.parametrize("ours_first", [False, True], ids=["ours last", "ours first"])
def test_e06_another_connector_wins_the_look_up(ours_first: bool, mode: str) -> None:
    settings = {"host_bytes": 1 << 20, "save_policy": "all"}
    ours = child("SAMConnector", "sam_connector") | {
        "kv_connector_extra_config": settings,
        "kv_load_failure_policy": "recompute",
    }
    toy: dict[str, Any] = child("ToyConnector", "tests.connector.toy_connector")
    toy |= {"kv_connector_extra_config": {"fault": None}}
    with TieredDriver(
        MULTI,
        host_bytes=None,
        extra_config={"connectors": [ours, toy] if ours_first else [toy, ours]},
        gate=None,
        **MODES[mode],
    ) as driver:
        connector = connector_of(driver)
        other = connector.sub_connectors[ours_first]
        told = reports_of(driver)
        run_until_idle(driver, "save", PROMPT)
        assert driver.tier.stats()["host_used_slots"] == 10
        assert driver.scheduler.reset_prefix_cache()
        run_until_idle(driver, "load", PROMPT)
        assert driver.tier.stats()["external_hit_requests"] == ours_first
        assert other.num_loads == (not ours_first)
        assert told["load"] == 1
        driver.check_no_leak()


def run_until_idle(driver: TieredDriver, request_id: str, prompt: list[int]) -> None:
    driver.add(request_id, prompt, max_tokens=3)
    for _ in range(500):
        if driver.engine.is_idle:
            break
        driver.engine.step()
        driver.ranks.check_prefix_cache()
    assert_answered(driver, request_id, prompt, 3)


@pytest.mark.parametrize("mode", MODES)
def test_e06_a_load_is_reported_once_though_hints_went_off(
    mode: str,
) -> None:
    """An error of ours between look-up and allocation, e.g. in a callback of it."""

    def fail() -> None:
        raise ZeroDivisionError

    with saved(**MODES[mode]) as driver:
        told = reports_of(driver)
        hold(driver)
        on_allocation(driver, lambda: driver.side.guarded(fail))
        driver.add("r", PROMPT, max_tokens=3)
        for _ in range(10):
            driver.engine.step()
            for gate in driver.ranks.gates:
                for job in gate.held[:1]:
                    gate.release(job.job_id)
        driver.ranks.open()
        driver.engine.run_until_idle(100)
        assert told == {"r": 1}
        assert_answered(driver, "r", PROMPT, 3)
        assert driver.pool.get_num_free_blocks() == 63


# --- E09, E10: accounts after many aborts ---------------------------------------------


def test_e09_a_thousand_prefetches_that_come_to_nothing() -> None:
    """Evicted, freed, reset or overtaken: while queued, while copied, or after."""
    rng = random.Random(0)
    with saving(num_blocks=40) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        for gate in driver.ranks.gates:
            gate.plan = type(gate.plan)(max_delay=3, failure_rate=0.05, shuffle=True)
        for number in range(1_000):
            if not driver.call("get_session", tenant="", session_id="s")["found"]:
                driver.add(f"r{number}", PROMPT, agent_hint=hint("s", ttl=60))
                driver.engine.run_until_idle()
            if rng.random() < 0.5:
                driver.scheduler.reset_prefix_cache()
            driver.edit("s", {"type": "prefetch"})
            for _ in range(rng.randrange(5)):
                driver.engine.step()
            end = rng.randrange(4)
            if end == 0:
                driver.edit("s", {"type": "evict"})
            elif end == 1:
                driver.call("free_session", tenant="", session_id="s")
            elif end == 2:
                driver.add(f"o{number}", PROMPT[: rng.randrange(1, 160)])
                driver.engine.step()
            if number % 50 == 0:
                step(driver)
        driver.ranks.open()
        driver.check_no_leak()
        stats = driver.tier.stats()
        assert stats["host_pinned_slots"] == stats["gpu_pinned_blocks"] == 0
        assert driver.tier.state.jobs.num_blocks == 0


def states() -> dict[str, Callable[[TieredDriver], None]]:
    """How far a request that loads, runs and is saved may have come."""

    def queued(driver: TieredDriver) -> None:
        pass

    def loading(driver: TieredDriver) -> None:
        step(driver, 2)

    def loaded(driver: TieredDriver) -> None:
        step(driver, 2)
        for gate in driver.ranks.gates:
            gate.release()
        driver.engine.step()

    def failed(driver: TieredDriver) -> None:
        step(driver, 2)
        for gate in driver.ranks.gates:
            gate.release(error="broken")
        driver.engine.step()

    def running(driver: TieredDriver) -> None:
        loaded(driver)
        step(driver, 4)

    def saving_it(driver: TieredDriver) -> None:
        loaded(driver)
        step(driver, 60)

    return {
        f.__name__: f for f in (queued, loading, loaded, failed, running, saving_it)
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", states())
def test_e10_abort_from_any_state_gives_the_budget_back(state: str, mode: str) -> None:
    with saved(**MODES[mode]) as driver:
        budget = driver.tier.state.budget
        for attempt in range(3):
            hold(driver)
            driver.add(f"r{attempt}", PROMPT, max_tokens=30)
            states()[state](driver)
            abort_now(driver, f"r{attempt}")
            step(driver, 2)
            state_of_tier = driver.tier.state
            assert budget - state_of_tier.budget == sum(
                len(job.copies)
                for job in state_of_tier.jobs.open_jobs().values()
                if job.request_id is None
            )
            driver.ranks.open()
            finish(driver)
            assert state_of_tier.budget == budget
            lose_engine_cache(driver)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
def test_e10_nothing_is_remembered_of_who_left_before_the_failure(
    mode: str,
) -> None:
    with saved(**MODES[mode]) as driver:
        hold(driver)
        driver.add("r", PROMPT)
        step(driver, 3)
        abort_now(driver, "r")
        step(driver, 2)
        for gate in driver.ranks.gates:
            gate.release(error="broken")
        driver.ranks.open()
        finish(driver)
        # A later request may have the same id, and is served as any other.
        run(driver, "save", PROMPT)
        lose_engine_cache(driver)
        request = waiting_request(PROMPT)
        request.request_id = "r"
        assert matched(driver, request) == (144, True)
        driver.check_no_leak()


def test_e10_ten_thousand_aborts() -> None:
    rng = random.Random(1)
    with saved(num_blocks=40) as driver:
        before = account(driver)["gpu_pinned_blocks"]
        gate = driver.ranks.gates[0]
        gate.plan = type(gate.plan)(max_delay=2)
        for number in range(10_000):
            driver.add(f"r{number}", PROMPT[: rng.randrange(17, 160)], max_tokens=5)
            if rng.random() < 0.2:
                driver.engine.step()
            if rng.random() < 0.9:
                abort_now(driver, f"r{number}")
            if number % 40 == 0:
                driver.engine.run_until_idle()
                driver.scheduler.reset_prefix_cache()
        driver.engine.run_until_idle()
        lose_engine_cache(driver)
        num_loads = len(jobs_of(gate, LOAD))
        run(driver, "load", PROMPT)
        assert len(jobs_of(gate, LOAD)) == num_loads + 1
        assert len(jobs_of(gate, STORE)) >= 1
        assert driver.tier.stats()["gpu_pinned_blocks"] == before == 0
        driver.check_no_leak()
