"""``SPMConnector`` in the real scheduler, around connectors that tests control."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.driving import STREAMS, hint
from tests.connector.spm.driving import SpmDriver
from tests.connector.spm.inner_connectors import CALLS, LOADED, RAISING, SENT

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 10
PROMPT = STREAMS[0][: NUM_BLOCKS * 16]


@pytest.fixture(params=["FaultyToy", "SequenceToy"])
def inner(request: pytest.FixtureRequest) -> str:
    """An asynchronous connector with a key per block; a synchronous one with a key
    per sequence."""
    return str(request.param)


def serve(driver: SpmDriver, session_id: str = "s") -> Any:
    """A request of the session, long enough to compute all its prompt's blocks."""
    request = driver.add(
        f"r-{session_id}", [*PROMPT, 7], agent_hint=hint(session_id, ttl=60)
    )
    driver.engine.run_until_idle()
    driver.check()
    return request


# --- there and back -------------------------------------------------------------------


def test_a_session_comes_back_after_the_cache_was_emptied(inner: str) -> None:
    with SpmDriver(inner) as driver:
        request = serve(driver)
        assert driver.ask("s", "offload")["status"] == "completed"
        driver.empty_cache()
        assert driver.resident(request) == []
        result = driver.ask("s", "prefetch")
        assert result["status"] == "completed", result
        assert result["blocks"]["done"] == NUM_BLOCKS
        assert len(driver.resident(request)) == NUM_BLOCKS
        session = driver.call("get_session", tenant="", session_id="s")["result"]
        assert session["blocks"]["gpu"] == NUM_BLOCKS
        driver.check_no_leak()


@pytest.mark.parametrize("lag", [{}, {1: 2}])
def test_every_rank_has_its_share(inner: str, lag: dict[int, int]) -> None:
    with SpmDriver(inner, tensor_parallel_size=2, report_lag=lag) as driver:
        request = serve(driver)
        assert driver.ask("s", "offload")["status"] == "completed"
        driver.empty_cache()
        assert driver.ask("s", "prefetch")["status"] == "completed"
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.check_no_leak()


def test_blocks_get_their_hash_once_the_last_rank_has_loaded() -> None:
    with SpmDriver("SequenceToy", tensor_parallel_size=2, report_lag={1: 3}) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        (result,) = driver.edit("s", {"type": "prefetch"})
        assert result["status"] == "accepted"
        driver.step(3)
        assert driver.resident(request) == []
        driver.engine.run_until_idle()
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.check_no_leak()


def test_an_offload_ends_retention_only_once_saved() -> None:
    with SpmDriver("SequenceToy", tensor_parallel_size=2, report_lag={1: 3}) as driver:
        serve(driver)
        driver.spm.keys.clear()
        driver.inner.storage.clear()  # which the prompt has filled
        (result,) = driver.edit("s", {"type": "offload"})
        assert result["status"] == "accepted"
        driver.step(3)
        assert driver.manager.stats().protected_blocks == NUM_BLOCKS
        driver.engine.run_until_idle()
        assert driver.manager.stats().protected_blocks == 0
        assert len(driver.inner.storage) == 1
        driver.check_no_leak()


def test_a_prefetch_keeps_the_part_that_is_there(inner: str) -> None:
    with SpmDriver(inner, num_blocks=32) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.run("other", STREAMS[1][: 4 * 16])
        left = driver.resident(request)
        num_left = len(left)
        assert 0 < num_left < NUM_BLOCKS
        result = driver.ask("s", "prefetch")
        # A request may be reading what is there.
        assert set(left).isdisjoint(LOADED)
        assert result["status"] == "completed", result
        assert result["blocks"]["already"] == num_left
        assert result["blocks"]["done"] == NUM_BLOCKS - num_left
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.check_no_leak()


def test_the_inner_connector_serves_requests_without_sessions() -> None:
    with SpmDriver() as driver:
        expected = driver.run("a", [*PROMPT, 7], max_tokens=3)
        driver.empty_cache()
        assert len(driver.run("b", [*PROMPT, 7], max_tokens=3)) == len(expected)
        assert driver.inner.num_loads == 1
        driver.check_no_leak()


# --- bounds ---------------------------------------------------------------------------


def test_a_long_prefetch_goes_in_several_loads() -> None:
    with SpmDriver(extra_config={"max_prefetch_blocks": 4}) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        result = driver.ask("s", "prefetch")
        assert result["status"] == "completed", result
        assert driver.inner.num_loads == 3
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.check_no_leak()


def test_a_key_too_long_for_one_load_is_not_loaded() -> None:
    with SpmDriver("SequenceToy", extra_config={"max_prefetch_blocks": 4}) as driver:
        serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        result = driver.ask("s", "prefetch")
        assert result["status"] == "rejected"
        assert "max_prefetch_blocks" in result["reason"]
        driver.check_no_leak()


def test_a_prefetch_leaves_the_reserve(inner: str) -> None:
    with SpmDriver(inner, extra_config={"prefetch_reserve": 0.9}) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        result = driver.ask("s", "prefetch")
        assert result["status"] == "rejected"
        assert "no room" in result["reason"]
        assert driver.resident(request) == []
        driver.check_no_leak()


def test_operations_beyond_the_bound_are_rejected() -> None:
    with SpmDriver("SequenceToy", extra_config={"max_operations": 2}) as driver:
        serve(driver)
        edits = [{"type": "prefetch"}] * 4
        statuses = [result["status"] for result in driver.edit("s", *edits)]
        assert statuses == ["accepted", "accepted", "rejected", "rejected"]
        driver.engine.run_until_idle()
        driver.check_no_leak()


def test_a_prefetch_waits_for_a_step_without_other_loads() -> None:
    with SpmDriver() as driver:
        serve(driver)
        driver.ask("s", "offload")
        driver.run("saved", STREAMS[1][:65])
        driver.empty_cache()
        driver.edit("s", {"type": "prefetch"})
        driver.add("loads", STREAMS[1][:65])
        driver.step(1)
        # The request's load was first.
        assert driver.inner.num_loads == 1
        assert not driver.spm.stats()["gpu_pinned_blocks"]
        driver.engine.run_until_idle()
        assert driver.inner.num_loads == 2
        driver.check_no_leak()


# --- evict, reset ---------------------------------------------------------------------


def test_evict_cancels_a_prefetch_under_way(inner: str) -> None:
    with SpmDriver(inner, tensor_parallel_size=2, report_lag={1: 3}) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        (result,) = driver.edit("s", {"type": "prefetch"})
        driver.step(1)
        assert driver.spm.stats()["gpu_pinned_blocks"]
        assert driver.edit("s", {"type": "evict"})[0]["status"] == "completed"
        driver.engine.run_until_idle()
        assert driver.resident(request) == []
        operation = driver.call(
            "get_operation", tenant="", operation_id=result["operation_id"]
        )["result"]
        assert operation["status"] in ("rejected", "accepted")
        assert driver.edit("s", {"type": "prefetch"})[0]["status"] == "not_found"
        driver.check_no_leak()


def test_a_reset_of_everything_forgets_what_was_saved(inner: str) -> None:
    with SpmDriver(inner) as driver:
        serve(driver)
        driver.ask("s", "offload")
        assert driver.scheduler.reset_prefix_cache()
        driver.connector.reset_cache()
        assert driver.edit("s", {"type": "prefetch"})[0]["status"] == "not_found"
        assert driver.spm.stats()["keys_tracked"] == 0
        driver.check_no_leak()


def test_what_was_loading_when_everything_was_reset_is_not_published() -> None:
    with SpmDriver("SequenceToy", report_lag={0: 3}) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        driver.edit("s", {"type": "prefetch"})
        driver.step(1)
        driver.connector.reset_cache()
        driver.engine.run_until_idle()
        assert driver.resident(request) == []
        driver.check_no_leak()


# --- an inner connector that fails ----------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("FaultyToy", {"fault": "no_load"}), ("SequenceToy", {"does_nothing": True})],
)
def test_a_load_that_wrote_nothing_is_not_believed(
    kind: str, settings: dict[str, Any]
) -> None:
    with SpmDriver(kind, inner_config=settings) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        result = driver.ask("s", "prefetch")
        assert result["status"] == "rejected"
        assert "not written" in result["reason"]
        assert driver.resident(request) == []
        driver.check_no_leak()


def test_one_rank_that_wrote_nothing_is_enough() -> None:
    config = {"fault": "rank_skips"}
    with SpmDriver(inner_config=config, tensor_parallel_size=2) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        assert driver.ask("s", "prefetch")["status"] == "rejected"
        assert driver.resident(request) == []
        driver.check_no_leak()


def test_a_prefetch_that_raises_is_rejected_and_not_tried_again(inner: str) -> None:
    with SpmDriver(inner) as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        RAISING.add("start_load_kv")
        result = driver.ask("s", "prefetch")
        assert result["status"] == "rejected"
        assert "start_load_kv was told to fail" in result["reason"]
        RAISING.clear()
        assert driver.resident(request) == []
        assert "a moment ago" in str(driver.ask("s", "prefetch")["reason"])
        driver.check_no_leak()


@pytest.mark.parametrize(
    "method", ["start_load_kv", "build_connector_meta", "get_num_new_matched_tokens"]
)
def test_a_request_whose_load_fails_computes(method: str) -> None:
    with SpmDriver() as driver:
        expected = driver.run("a", [*PROMPT, 7], max_tokens=3)
        driver.empty_cache()
        RAISING.add(method)
        request = driver.add("b", [*PROMPT, 7], max_tokens=3)
        driver.step(2)
        RAISING.clear()
        driver.engine.run_until_idle()
        assert len(driver.engine.outputs["b"]) == len(expected)
        assert request.num_preemptions == 0
        driver.check_no_leak()


def test_what_could_not_be_loaded_is_not_offered_to_the_next_request() -> None:
    with SpmDriver() as driver:
        driver.run("a", [*PROMPT, 7])
        driver.empty_cache()
        RAISING.add("start_load_kv")
        driver.add("b", [*PROMPT, 7])
        driver.step(2)
        RAISING.clear()
        driver.engine.run_until_idle()
        driver.empty_cache()
        driver.run("c", [*PROMPT, 7])
        assert driver.inner.num_loads == 1
        assert driver.spm.stats()["failed_loads"] == 1
        driver.check_no_leak()


@pytest.mark.parametrize("method", ["save_kv_layer", "wait_for_save"])
def test_an_offload_whose_save_raises_keeps_the_session(method: str) -> None:
    with SpmDriver("SequenceToy") as driver:
        RAISING.add(method)
        serve(driver)
        assert driver.spm.stats()["keys_tracked"] == 0
        driver.inner.storage.clear()
        result = driver.ask("s", "offload")
        assert result["status"] == "rejected"
        assert f"{method} was told to fail" in result["reason"]
        assert driver.manager.stats().protected_blocks == NUM_BLOCKS
        RAISING.clear()
        driver.inner.storage.clear()
        assert driver.ask("s", "offload")["status"] == "completed"
        driver.check_no_leak()


@pytest.mark.parametrize(
    "answer", [(-16, False), (NUM_BLOCKS * 16 + 1, False), (8, True), (0, True)]
)
def test_answers_that_would_end_the_engine_do_not_reach_it(
    answer: tuple[int, bool],
) -> None:
    with SpmDriver() as driver:
        driver.inner.answer = answer
        assert driver.connector.get_num_new_matched_tokens(
            driver.add("r", [*PROMPT, 7]), 0
        )[0] in (0, NUM_BLOCKS * 16)
        driver.inner.answer = (0, False)
        driver.engine.run_until_idle()
        driver.check_no_leak()


def test_an_error_of_our_own_leaves_the_engine_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SpmDriver("SequenceToy") as driver:
        monkeypatch.setattr(driver.spm, "begin_step", lambda _: 1 // 0)
        driver.run("a", [*PROMPT, 7])
        monkeypatch.undo()
        assert driver.edit("s", {"type": "prefetch"})[0]["status"] == "not_found"
        driver.run("b", [*PROMPT, 7])
        driver.check_no_leak()


# --- what the inner connector must not see --------------------------------------------


def test_requests_it_cannot_tell_apart_are_kept_from_it() -> None:
    with SpmDriver("SequenceToy") as driver:
        driver.add("salted", [*PROMPT, 7], cache_salt="secret")
        driver.engine.run_until_idle()
        assert driver.inner.seen == []
        assert driver.inner.storage == {}
        driver.run("plain", [*PROMPT, 7])
        driver.empty_cache()
        num_loads = CALLS["start_load_kv"]
        driver.add("again", [*PROMPT, 7], cache_salt="secret")
        driver.engine.run_until_idle()
        assert "again" not in driver.inner.seen
        assert CALLS["start_load_kv"] > num_loads  # steps went on without it
        driver.check_no_leak()


def test_a_prompt_in_chunks_is_saved_by_its_offload_only() -> None:
    with SpmDriver("SequenceToy", max_num_batched_tokens=64) as driver:
        request = serve(driver)
        assert driver.inner.storage == {}
        result = driver.ask("s", "offload")
        assert result["status"] == "completed"
        assert result["blocks"]["done"] == NUM_BLOCKS
        driver.empty_cache()
        assert driver.ask("s", "prefetch")["status"] == "completed"
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.check_no_leak()


def test_our_own_requests_are_forgotten() -> None:
    with SpmDriver("SequenceToy") as driver:
        serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        driver.ask("s", "prefetch")
        driver.run("later", STREAMS[1][:40])
        ours = {r for r in driver.inner.seen if r.startswith("sam-spm-")}
        assert ours
        assert ours <= driver.inner.ended
        driver.check_no_leak()


def test_without_sessions_a_load_that_fails_is_not_offered_again() -> None:
    with SpmDriver(extra_config={"sam": "off"}) as driver:
        driver.add("a", [*PROMPT, 7])
        driver.engine.run_until_idle()
        assert driver.scheduler.reset_prefix_cache()
        RAISING.add("start_load_kv")
        driver.add("b", [*PROMPT, 7], max_tokens=2)
        driver.engine.run_until_idle(max_steps=100)
        assert len(driver.engine.outputs["b"]) == 2
        assert driver.inner.num_loads == 1


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"pipeline_parallel_size": 2}],
    ids=["async", "pipeline"],
)
def test_with_two_batches_in_flight(inner: str, options: dict[str, Any]) -> None:
    with SpmDriver(inner, **options) as driver:
        request = serve(driver)
        driver.add("long", STREAMS[2][:50], max_tokens=200)
        driver.step(3)
        assert driver.ask("s", "offload")["status"] == "completed"
        driver.run("taken", STREAMS[3][: 40 * 16])
        assert len(driver.resident(request)) < NUM_BLOCKS
        driver.add("long", STREAMS[2][:50], max_tokens=200)
        driver.step(3)
        result = driver.ask("s", "prefetch")
        assert result["status"] == "completed", result
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.check_no_leak()


def test_an_inner_connector_that_cannot_plan_is_not_called_again() -> None:
    with SpmDriver() as driver:
        driver.run("a", [*PROMPT, 7], agent_hint=hint("s"))
        driver.empty_cache()
        RAISING.add("build_connector_meta")
        driver.run("b", [*PROMPT, 7])
        RAISING.clear()
        driver.empty_cache()
        CALLS.clear()
        driver.run("c", [*PROMPT, 7], agent_hint=hint("s"))
        assert not CALLS
        for kind in ("offload", "prefetch"):
            assert driver.edit("s", {"type": kind})[0]["status"] == "unsupported"
        assert driver.edit("s", {"type": "evict"})[0]["status"] == "completed"
        driver.check_no_leak()


def test_blocks_that_the_inner_connector_goes_on_reading_stay_pinned() -> None:
    with SpmDriver() as driver:
        request = serve(driver)
        driver.ask("s", "offload")
        driver.empty_cache()
        driver.inner.lingers = True
        assert driver.ask("s", "prefetch")["status"] == "completed"
        assert driver.spm.stats()["gpu_pinned_blocks"]
        assert len(driver.resident(request)) == NUM_BLOCKS
        driver.step(3)
        assert driver.spm.stats()["gpu_pinned_blocks"]
        ours = f"sam-spm-{driver.connector._inner_scheduler._num_requests}"
        SENT.add(ours)
        driver.engine.run_until_idle()
        assert not driver.spm.stats()["gpu_pinned_blocks"]
        driver.check_no_leak()
