"""Faults of group O: resets, other weights, sleep."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sam_connector.transfer.host_pool import HostPool
from tests.connector.driving import STREAMS, TieredDriver, hint
from tests.connector.tier.situations import (
    LOAD,
    MODES,
    PROMPT,
    assert_answered,
    connector_of,
    contents_of,
    finish,
    hold,
    jobs_of,
    lose_engine_cache,
    matched,
    run,
    saved,
    saving,
    step,
    tier_has,
    waiting_request,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

OTHER = STREAMS[1][:160]


def reset_all(driver: TieredDriver) -> bool:
    """``/reset_prefix_cache?reset_external=true``."""
    return bool(driver.scheduler.reset_prefix_cache(reset_connector=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["all", "hinted"])
def test_o01_nothing_of_old_weights_is_served(policy: str, mode: str) -> None:
    with saving(policy, **MODES[mode]) as driver:
        driver.run("warm", PROMPT, agent_hint=hint("s", ttl=60))
        driver.edit("s", {"type": "offload"})
        finish(driver)
        assert tier_has(driver, PROMPT) == 10
        assert reset_all(driver)
        driver.ranks.reload_weights()
        stats = driver.tier.stats()
        assert stats["host_used_slots"] == stats["host_held_slots"] == 0
        assert driver.manager.stats().claimed_blocks == 0
        request = driver.add("r", PROMPT, max_tokens=5)
        assert matched(driver, request) == (0, False)
        assert driver.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 0
        finish(driver)
        assert_answered(driver, "r", PROMPT, 5)
        driver.check_no_leak()


def test_o03_a_reset_of_the_engine_alone_leaves_the_tier() -> None:
    """vLLM does not tell a connector of it, and the tier's content is still right."""
    with saved() as driver:
        lose_engine_cache(driver)
        run(driver, "warm", PROMPT)
        assert driver.tier.stats()["external_hit_tokens"] == 144
        assert reset_all(driver)
        run(driver, "cold", PROMPT)
        assert driver.tier.stats()["external_hit_tokens"] == 144
        assert driver.tier.stats()["external_hit_requests"] == 1
        driver.check_no_leak()


def everything_pending(driver: TieredDriver) -> None:
    """A save, an offload, a prefetch, a load and a look-up, none of them at its end."""
    driver.run("s", OTHER, agent_hint=hint("s", ttl=60))
    driver.run("t", STREAMS[2][:160], agent_hint=hint("t", ttl=60))
    driver.edit("t", {"type": "offload"})
    finish(driver)
    driver.pool.evict_blocks(set(driver.free_ids()))
    driver.add("u", STREAMS[4][:160], max_tokens=2, agent_hint=hint("u", ttl=60))
    finish(driver)
    for content in contents_of(driver, STREAMS[4][:160]):
        driver.tier.state.slots.forget(content)
    hold(driver)
    driver.tier.state.max_inflight_blocks = 16
    driver.edit("t", {"type": "prefetch"})
    driver.edit("u", {"type": "offload"})
    step(driver, 2)
    driver.add("load", PROMPT, max_tokens=3)
    driver.add("save", STREAMS[3][:200], max_tokens=2)
    step(driver, 4)
    driver.add("looked up", PROMPT, max_tokens=3)
    matched(driver, driver.scheduler.requests["looked up"])
    stats = driver.tier.stats()
    assert stats["operations_open"] == 2
    assert stats["jobs_in_flight"] == 3
    assert stats["host_pinned_slots"] == 10 + 6 + 9
    assert stats["queued_saves"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ends", ["well", "badly"])
@pytest.mark.parametrize("is_from_a_client", [False, True])
def test_o04_a_reset_with_everything_under_way(
    is_from_a_client: bool, ends: str, mode: str
) -> None:
    """What ends after the reset was decided before it, and comes to nothing."""
    with saved(num_blocks=120, **MODES[mode]) as driver:
        everything_pending(driver)
        if is_from_a_client:
            driver.call("reset")
        else:
            # The engine's own part fails while requests have blocks.
            reset_all(driver)
        stats = driver.tier.stats()
        assert stats["host_used_slots"] == stats["host_held_slots"] == 0
        assert stats["queued_saves"] == 0
        step(driver, 2)
        for gate in driver.ranks.gates:
            gate.release(error="broken" if ends == "badly" else None)
        assert driver.tier.state.generation == 1
        step(driver, 3)
        for prompt in (OTHER, STREAMS[2][:160]):
            assert tier_has(driver, prompt) == 0
        driver.ranks.open()
        finish(driver)
        for request_id, prompt in (("load", PROMPT), ("looked up", PROMPT)):
            assert_answered(driver, request_id, prompt, 3)
        driver.check_no_leak()


@pytest.mark.parametrize("mode", MODES)
def test_o04_a_store_that_ends_after_the_reset_brings_no_key_back(mode: str) -> None:
    with saving(**MODES[mode]) as driver:
        hold(driver)
        driver.add("old", PROMPT)
        step(driver, 4)
        connector_of(driver).reset_cache()
        driver.ranks.reload_weights()
        driver.pool.evict_blocks({block.block_id for block in driver.pool.blocks[1:]})
        for gate in driver.ranks.gates:
            gate.release()
        driver.engine.step()
        driver.engine.step()
        assert tier_has(driver, PROMPT) == 0
        driver.ranks.open()
        finish(driver)
        run(driver, "new", PROMPT, 3)
        assert not jobs_of(driver.ranks.gates[0], LOAD)
        driver.check_no_leak()


def test_o06_an_operator_can_void_everything_without_a_restart() -> None:
    """There is no namespace to bump: after new weights the caches are reset."""
    with saved() as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        driver.call("reset")
        reply = driver.call("get_session", tenant="", session_id="s")
        assert not any(
            context["num_blocks"]
            for context in (reply["result"] or {}).get("contexts", [])
        )
        assert matched(driver, waiting_request(PROMPT)) == (0, False)
        assert tier_has(driver, PROMPT) == 0


@pytest.mark.parametrize("kind", ["offload", "prefetch"])
def test_o07_nothing_is_copied_while_the_engine_sleeps(kind: str) -> None:
    """A sleeping engine's memory may be gone; vLLM calls it paused."""
    with saved() as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        num_copies = len(driver.ranks.gates[0].history)
        payload = {"op": "apply_edits", "tenant": "", "session_id": "s"}
        answer = driver.side.control(
            json.dumps(payload | {"edits": [{"type": kind}]}), is_paused=True
        )
        assert isinstance(answer, str)
        (result,) = json.loads(answer)["result"]["results"]
        assert result["status"] == "rejected"
        assert not driver.tier.has_pending_work
        step(driver, 3)
        assert len(driver.ranks.gates[0].history) == num_copies
        driver.check_no_leak()


@pytest.mark.parametrize("pending", ["load", "save", "offload", "prefetch"])
def test_o07_the_engine_knows_that_copies_are_under_way(pending: str) -> None:
    """vLLM lets them end before it sleeps, and before it says that it is paused."""
    with saved(num_blocks=100) as driver:
        driver.run("r", OTHER, agent_hint=hint("s", ttl=60))
        finish(driver)
        hold(driver)
        begin: dict[str, Callable[[], Any]] = {
            "load": lambda: driver.add("load", PROMPT),
            "save": lambda: driver.add("save", STREAMS[3][:160]),
            "offload": lambda: again(driver, "offload"),
            "prefetch": lambda: again(driver, "prefetch"),
        }
        begin[pending]()
        step(driver, 4)
        connector = connector_of(driver)
        assert driver.tier.stats()["jobs_in_flight"] == 1
        assert connector.has_pending_push_work()
        held = driver.tier.stats()["gpu_pinned_blocks"]
        assert connector.has_pending_block_frees() == (held > 0)
        assert (held > 0) == (pending != "load")
        driver.ranks.open()
        finish(driver)
        assert not connector.has_pending_push_work()
        assert not connector.has_pending_block_frees()
        driver.check_no_leak()


def again(driver: TieredDriver, kind: str) -> None:
    if kind == "offload":
        for content in list(driver.tier.state.slots.contents()):
            driver.tier.state.slots.forget(content)
    else:
        driver.pool.evict_blocks(set(driver.free_ids()))
    driver.edit("s", {"type": kind})


def test_o09_slots_are_in_memory_that_no_allocator_of_torch_may_discard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("allocated by torch")

    for name in ("empty", "zeros", "empty_like", "full"):
        monkeypatch.setattr(f"torch.{name}", refuse)
    pool = HostPool(4, 64)
    assert pool.num_bytes == 256
    pool.close()
