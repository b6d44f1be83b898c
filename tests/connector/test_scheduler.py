"""The scheduler role with a host tier: its wiring, and what an error leaves behind."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks.engine_config import KVShape
from tests.connector.copy_gate import GatePlan
from tests.connector.driving import STREAMS, TieredDriver, hint
from tests.connector.tier.situations import (
    MODES,
    PROMPT,
    assert_answered,
    finish,
    hold,
    lose_engine_cache,
    saved,
    saving,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


def run_off(driver: TieredDriver, max_steps: int = 3_000) -> None:
    """Steps until idle, without the manager's checks: it may be off."""
    for _ in range(max_steps):
        if driver.engine.is_idle:
            return
        driver.engine.step()
        driver.ranks.check_prefix_cache()
    raise AssertionError("never idle")


def break_down(driver: TieredDriver) -> None:
    """Something of ours raises."""

    def fail() -> None:
        raise RuntimeError("an internal error")

    driver.side.guarded(fail)
    assert driver.side.host is None


def offload(driver: TieredDriver, session: str = "s") -> Any:
    (result,) = driver.edit(session, {"type": "offload"})
    assert result["status"] == "accepted"
    return result


# --- wiring -----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["all", "hinted", "on_demand"])
def test_without_session_hints_the_engine_comes_to_rest(policy: str) -> None:
    """The tier of a plain cache: nobody hears what it has to say."""
    options = {"sam": "off", "save_policy": policy}
    with TieredDriver(extra_config=options) as driver:
        driver.add("save", PROMPT)
        run_off(driver)
        lose_engine_cache(driver)
        driver.add("load", PROMPT)
        run_off(driver)
        assert not driver.side.has_pending_work
        assert_answered(driver, "load", PROMPT, 1)
        hits = driver.tier.stats()["external_hit_tokens"]
        assert bool(hits) == (policy == "all")


def test_stats_and_sessions_say_what_is_on_the_host() -> None:
    with TieredDriver(num_blocks=40) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        reply = driver.wait(
            "apply_edits",
            tenant="",
            session_id="s",
            edits=[{"type": "offload"}],
            wait_s=30,
        )
        (result,) = reply["result"]["results"]
        assert result["status"] == "completed"
        assert result["blocks"]["done"] == result["blocks"]["reclaimed"] == 10
        assert result["bytes"] == 10 * 512
        described = driver.call("get_session", tenant="", session_id="s")["result"]
        assert described["blocks"] == {"gpu": 0, "host": 10, "store": 0}
        stats = driver.call("get_stats")["result"]
        assert stats["host_used_slots"] == stats["host_held_slots"] == 10
        assert stats["saved_bytes"] == 10 * 512
        driver.check_no_leak()


def test_an_answer_waits_until_the_operation_has_ended(mode: dict[str, Any]) -> None:
    with saving("on_demand", **mode) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        hold(driver)
        payload = {
            "op": "apply_edits",
            "tenant": "",
            "session_id": "s",
            "edits": [{"type": "offload"}],
            "wait_s": 30,
        }
        answer = driver.side.control(json.dumps(payload), is_paused=False)
        assert isinstance(answer, Future)
        driver.step(5)
        assert not answer.done()
        driver.ranks.release()
        driver.step(5)
        assert json.loads(answer.result(0))["result"]["results"][0]["status"] == (
            "completed"
        )
        driver.check_no_leak()


def test_a_lease_in_the_engine_is_one_in_the_tier() -> None:
    with saving("on_demand") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        offload(driver)
        finish(driver)
        slots = driver.tier.state.slots
        num_slots = slots.num_slots
        assert slots.num_available(num_slots) == num_slots - 10
        driver.call("set_lease", tenant="", session_id="s", ttl=0)
        assert slots.num_available(num_slots) == num_slots
        driver.call("free_session", tenant="", session_id="s", tree=False)
        assert driver.tier.stats()["host_held_slots"] == 0
        assert driver.tier.stats()["host_used_slots"] == 10
        driver.check_no_leak()


def test_a_reset_call_empties_the_tier() -> None:
    with saved() as driver:
        assert driver.tier.stats()["host_used_slots"] == 10
        driver.call("reset")
        assert driver.tier.stats()["host_used_slots"] == 0
        driver.check_no_leak()


def test_a_reset_of_the_engines_cache_alone_leaves_the_tier() -> None:
    with saved() as driver:
        assert driver.scheduler.reset_prefix_cache()
        assert driver.tier.stats()["host_used_slots"] == 10
        assert driver.scheduler.reset_prefix_cache(reset_connector=True)
        assert driver.tier.stats()["host_used_slots"] == 0


def test_with_a_pipeline_the_rank_with_the_least_room_counts() -> None:
    shape = KVShape(num_layers=(1, 3))
    with TieredDriver(
        shape=shape, pipeline_parallel_size=2, host_bytes=2 * 768 * 20
    ) as driver:
        num_slots = [w.worker_side.pool.num_slots for w in driver.ranks.workers]
        assert num_slots == [60, 20]
        assert driver.tier.stats()["host_slots"] == 20
        # It is the same tier that sessions and control calls know.
        assert driver.tier.state.directory is driver.manager.directory
        assert driver.tier.has_listener
        assert driver.call("get_stats")["result"]["host_slots"] == 20
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        offload(driver)
        finish(driver)
        assert driver.tier.stats()["host_held_slots"] == 10
        driver.check_no_leak()


# --- blocks that will be given back -----------------------------------------


def test_blocks_that_a_copy_holds_are_waited_for_instead_of_preempting() -> None:
    with saving("on_demand", num_blocks=21) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s"))
        hold(driver)
        driver.tier.state.max_inflight_blocks = 10
        offload(driver)
        driver.step(2)
        connector: Any = driver.scheduler.connector
        assert connector.has_pending_block_frees()
        assert driver.pool.get_num_free_blocks() == 10
        running = driver.add("more", STREAMS[1][:150], max_tokens=40)
        driver.step(20)
        assert driver.pool.get_num_free_blocks() == 0
        assert running.num_preemptions == 0
        assert running.num_output_tokens < 40
        driver.ranks.open()
        driver.step(3)
        assert not connector.has_pending_block_frees()
        finish(driver)
        assert running.num_preemptions == 0
        assert_answered(driver, "more", STREAMS[1][:150], 40)
        driver.check_no_leak()


# --- internal errors --------------------------------------------------------


def test_after_an_internal_error_blocks_are_given_back_once_ranks_report(
    mode: dict[str, Any],
) -> None:
    with saving("on_demand", num_blocks=48, **mode) as driver:
        driver.run("a", PROMPT, agent_hint=hint("s", ttl=60))
        offload(driver)
        finish(driver)
        lose_engine_cache(driver)
        driver.run("b", STREAMS[1][:160], agent_hint=hint("t", ttl=60))
        driver.run("c", STREAMS[0][:32], agent_hint=hint("u"))
        driver.run("d", PROMPT[:16], agent_hint=hint("s", ttl=60))
        hold(driver)
        offload(driver, "t")
        driver.edit("s", {"type": "prefetch"})
        driver.step(4)
        connector: Any = driver.scheduler.connector
        num_pinned = driver.tier.stats()["gpu_pinned_blocks"]
        assert num_pinned >= 10
        break_down(driver)
        assert connector.has_pending_push_work()
        assert connector.has_pending_block_frees()
        for _ in range(5):
            driver.engine.step()
        assert driver.tier.stats()["gpu_pinned_blocks"] >= 10
        assert not driver.scheduler.reset_prefix_cache()
        driver.ranks.open()
        run_off(driver)
        assert driver.tier.stats()["gpu_pinned_blocks"] == 0
        assert not connector.has_pending_push_work()
        assert not connector.has_pending_block_frees()
        assert driver.scheduler.reset_prefix_cache()
        assert driver.pool.get_num_free_blocks() == 47


def test_after_an_internal_error_requests_that_wait_for_a_load_go_on(
    mode: dict[str, Any],
) -> None:
    with saved(**mode) as driver:
        hold(driver)
        driver.add("waits", PROMPT, max_tokens=3)
        driver.step(4)
        assert driver.engine.outputs.get("waits", []) == []
        break_down(driver)
        driver.add("later", PROMPT, max_tokens=3)
        for _ in range(8):
            driver.engine.step()
        assert driver.engine.outputs.get("waits", []) == []
        driver.ranks.open()
        run_off(driver)
        for request_id in ("waits", "later"):
            assert_answered(driver, request_id, PROMPT, 3)


def test_a_request_runs_though_its_load_could_not_be_planned(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("an internal error")

    with saved(**mode) as driver:
        monkeypatch.setattr(driver.tier, "start_load", fail)
        driver.add("r", PROMPT, max_tokens=3)
        run_off(driver)
        assert_answered(driver, "r", PROMPT, 3)
        assert driver.side.host is None
        driver.add("next", PROMPT, max_tokens=3)
        run_off(driver)
        assert_answered(driver, "next", PROMPT, 3)


@pytest.mark.parametrize(
    "method", ["num_new_matched_tokens", "on_step", "_on_ended", "on_request_finished"]
)
def test_an_error_in_the_tier_costs_no_request_anything(
    method: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("an internal error")

    with saved(**mode) as driver:
        num_failures = 0
        real = getattr(driver.tier, method)

        def fail_once(*args: Any, **more: Any) -> Any:
            nonlocal num_failures
            num_failures += 1
            return fail() if num_failures == 1 else real(*args, **more)

        driver.add("r", PROMPT, max_tokens=20)
        monkeypatch.setattr(driver.tier, method, fail_once)
        driver.add("s", STREAMS[1][:100], max_tokens=20)
        run_off(driver)
        assert num_failures
        assert_answered(driver, "r", PROMPT, 20)
        assert_answered(driver, "s", STREAMS[1][:100], 20)
        assert driver.tier.is_abandoned
        assert not driver.side.has_pending_work
        assert not driver.side.has_pinned_blocks
        assert driver.pool.get_num_free_blocks() == driver.pool.num_gpu_blocks - 1
        reply = driver.call("get_stats")
        assert not reply["ok"]


def test_clients_that_wait_are_answered_after_an_internal_error() -> None:
    with saving("on_demand") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        hold(driver)
        payload = {
            "op": "apply_edits",
            "tenant": "",
            "session_id": "s",
            "edits": [{"type": "offload"}],
            "wait_s": 30,
        }
        answer = driver.side.control(json.dumps(payload), is_paused=False)
        assert isinstance(answer, Future)
        driver.step(2)
        break_down(driver)
        assert json.loads(answer.result(0))["ok"]
        driver.ranks.open()
        run_off(driver)


def test_copies_may_outlast_many_steps(mode: dict[str, Any]) -> None:
    """And the requests that were there before them."""
    gate = GatePlan(max_delay=9, shuffle=True, copy_at="either", seed=3)
    driver = TieredDriver(gate=gate, extra_config={"save_policy": "all"}, **mode)
    with driver:
        for number in range(6):
            driver.add(f"r{number}", STREAMS[number % 3][:200], max_tokens=9)
            driver.step(2)
        finish(driver)
        driver.check_no_leak()
