"""The queue of operations: what waits, what gives up, what comes back to it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.driving import STREAMS, hint
from tests.connector.spm.driving import SpmDriver
from tests.connector.spm.inner_connectors import CALLS

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 10
PROMPT = [*STREAMS[0][: NUM_BLOCKS * 16], 7]


def saved(driver: SpmDriver) -> Any:
    request = driver.add("r", PROMPT, agent_hint=hint("s", ttl=60))
    driver.engine.run_until_idle()
    assert driver.ask("s", "offload")["status"] == "completed"
    driver.empty_cache()
    return request


def test_an_inner_look_up_without_an_answer_is_asked_again_up_to_a_deadline() -> None:
    with SpmDriver(extra_config={"confirm_timeout_s": 0.1}) as driver:
        request = saved(driver)
        driver.inner.answer = (None, False)
        before = CALLS["get_num_new_matched_tokens"]
        result = driver.wait(
            "apply_edits",
            max_steps=100_000,
            tenant="",
            session_id="s",
            edits=[{"type": "prefetch"}],
            wait_s=30,
        )["result"]["results"][0]
        assert result["status"] == "rejected"
        assert "no answer" in result["reason"]
        # Not in every step.
        assert 1 < CALLS["get_num_new_matched_tokens"] - before < 20
        assert driver.resident(request) == []
        driver.inner.answer = None
        driver.check_no_leak()


def test_an_offload_waits_for_one_that_saves_on_its_own() -> None:
    with SpmDriver(extra_config={"confirm_timeout_s": 0.1}) as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        driver.inner.answer = (64, True)
        result = driver.wait(
            "apply_edits",
            max_steps=100_000,
            tenant="",
            session_id="s",
            edits=[{"type": "offload"}],
            wait_s=30,
        )["result"]["results"][0]
        assert result["status"] == "partial"
        assert result["blocks"]["already"] == 4
        assert "has not saved all of it" in result["reason"]
        assert driver.manager.stats().protected_blocks == NUM_BLOCKS
        driver.inner.answer = None
        driver.check_no_leak()


def test_an_offload_of_what_is_in_no_cache_is_not_claimed() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.run("r", PROMPT, agent_hint=hint("s", ttl=60))
        driver.inner.storage.clear()
        driver.spm.keys.clear()
        for number in range(3):
            driver.run(f"other-{number}", STREAMS[1 + number][: 60 * 16])
        result = driver.ask("s", "offload")
        assert result["status"] == "rejected"
        assert "not all of it is in the engine's cache" in result["reason"]
        driver.check_no_leak()


def test_a_shorter_key_is_loaded_if_the_longer_one_is_gone() -> None:
    with SpmDriver("SequenceToy") as driver:
        request = saved(driver)
        driver.run("turn", [*PROMPT[:160], *STREAMS[1][:80]], agent_hint=hint("s"))
        driver.ask("s", "offload")
        driver.empty_cache()
        longest = max(driver.inner.storage, key=len)
        assert len(longest) > 160
        for tokens in [t for t in driver.inner.storage if len(t) > 160]:
            del driver.inner.storage[tokens]
        result = driver.ask("s", "prefetch")
        assert result["status"] == "partial", result
        assert len(driver.resident(request)) == NUM_BLOCKS
        session = driver.call("get_session", tenant="", session_id="s")["result"]
        assert session["blocks"]["gpu"] == NUM_BLOCKS
        driver.check_no_leak()


def test_what_is_there_already_is_not_loaded() -> None:
    with SpmDriver() as driver:
        saved(driver)
        driver.ask("s", "prefetch")
        num_loads = driver.inner.num_loads
        result = driver.ask("s", "prefetch")
        assert result["blocks"]["already"] == NUM_BLOCKS
        assert result["blocks"]["done"] == 0
        assert driver.inner.num_loads == num_loads
        driver.check_no_leak()


def test_a_pause_ends_what_waits() -> None:
    with SpmDriver() as driver:
        request = saved(driver)
        (result,) = driver.edit("s", {"type": "prefetch"})

        class Paused:
            def is_sleeping(self) -> bool:
                return True

        driver.side.waker._engine = Paused()
        driver.engine.run_until_idle()
        assert driver.resident(request) == []
        assert not driver.spm.has_pending
        driver.side.waker._engine = None
        operation = driver.call(
            "get_operation", tenant="", operation_id=result["operation_id"]
        )["result"]
        assert operation["reason"] == "the engine is paused"
        driver.check_no_leak()
