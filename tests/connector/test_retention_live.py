"""What hints do to the order in which the real pool reuses blocks."""

from __future__ import annotations

import pytest

from tests.connector.driving import STREAMS, Driver, evict_when_done, hint

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("async_scheduling", [False, True]),
]

A, B, C = (stream[:160] for stream in STREAMS[:3])  # ten blocks each


def test_a_leased_context_outlives_pressure_that_evicts_an_ordinary_one(
    async_scheduling: bool,
) -> None:
    driver = Driver(num_blocks=40, async_scheduling=async_scheduling)
    leased = driver.add("leased", A, agent_hint=hint("s", ttl=300))
    ordinary = driver.add("ordinary", B)
    driver.engine.run_until_idle()
    driver.run("pressure", STREAMS[3][:400])
    assert len(driver.resident(leased)) == 10
    assert len(driver.resident(ordinary)) < 10
    driver.check_no_leak()


def test_a_lease_never_stops_an_allocation(async_scheduling: bool) -> None:
    """L06: retention is a bias; when only protected blocks are left they go."""
    driver = Driver(
        num_blocks=32,
        async_scheduling=async_scheduling,
        extra_config={"max_protected_fraction": 1.0},
    )
    for number, stream in enumerate(STREAMS[:3]):
        driver.run(f"r{number}", stream[:160], agent_hint=hint(f"s{number}", ttl=300))
    assert driver.manager.stats().protected_blocks == 30
    assert driver.run("all", STREAMS[4][:480], max_tokens=2)
    assert driver.manager.stats().leases_broken >= 29
    driver.check_no_leak()


def test_evict_makes_a_sessions_blocks_the_next_to_be_reused(
    async_scheduling: bool,
) -> None:
    driver = Driver(async_scheduling=async_scheduling)
    for name, tokens in (("a", A), ("b", B), ("c", C)):
        request = driver.add(name, tokens, agent_hint=hint(name, ttl=300))
        driver.engine.run_until_idle()
    resident = driver.resident(request)
    (result,) = driver.edit("c", {"type": "evict"})
    assert result["status"] == "completed"
    assert result["blocks"]["done"] == 10
    # The tail goes first, so that what is left is still a usable prefix.
    assert driver.free_ids()[:10] == resident[::-1]
    # A hint is no invalidation: until they are reused they are still hit.
    assert len(driver.resident(request)) == 10
    driver.check_no_leak()


def test_evict_in_the_hint_of_the_last_request(async_scheduling: bool) -> None:
    driver = Driver(async_scheduling=async_scheduling)
    driver.run("other", B)
    request = driver.add("a", A, agent_hint=evict_when_done("a"))
    driver.engine.run_until_idle()
    assert set(driver.free_ids()[:11]) >= set(driver.resident(request))
    driver.check_no_leak()


def test_evict_touches_no_block_that_another_session_holds(
    async_scheduling: bool,
) -> None:
    driver = Driver(async_scheduling=async_scheduling)
    shared, own = A[:96], A[96:]
    parent = driver.add("p", shared + B[:64], agent_hint=hint("p", ttl=300))
    driver.engine.run_until_idle()
    driver.run("c", shared + own, agent_hint=hint("c", ttl=300))
    before = driver.resident(parent)
    driver.edit("c", {"type": "evict"})
    assert not set(driver.free_ids()[:4]) & set(before)
    assert driver.manager.stats().protected_blocks == len(before)
    driver.check_no_leak()


def test_evict_touches_no_block_in_use(async_scheduling: bool) -> None:
    driver = Driver(async_scheduling=async_scheduling)
    driver.run("first", A, agent_hint=hint("s", ttl=300))
    running = driver.add("second", A + B, max_tokens=20, agent_hint=hint("s", ttl=300))
    for _ in range(4):
        driver.engine.step()
    in_use = {b.block_id for b in driver.pool.blocks if b.ref_cnt and not b.is_null}
    assert len(in_use) >= 20
    driver.edit("s", {"type": "evict"})
    assert {b.block_id for b in driver.pool.blocks if b.ref_cnt and not b.is_null} == (
        in_use
    )
    driver.check()
    expected = Driver("null", async_scheduling=async_scheduling)
    driver.engine.run_until_idle()
    expected.add("second", A + B, max_tokens=20)
    expected.engine.run_until_idle()
    assert driver.engine.outputs["second"] == expected.engine.outputs["second"]
    # What the running request had is as dead as the rest of the session.
    assert driver.call("get_session", tenant="", session_id="s")["found"] is False
    assert set(driver.resident(running)[:20]) <= set(driver.free_ids()[:24])
    driver.check_no_leak()


def test_abort_after_assignment_leaves_the_prefix_associated(
    async_scheduling: bool,
) -> None:
    driver = Driver(async_scheduling=async_scheduling, max_num_batched_tokens=64)
    driver.add("r", A + B, max_tokens=5, agent_hint=hint("s", ttl=300))
    driver.engine.step()
    driver.engine.step()
    driver.engine.abort("r")
    driver.engine.run_until_idle()
    driver.check()
    assert driver.manager.stats().claimed_blocks > 0
    driver.check_no_leak()


def test_abort_before_scheduling_replaces_nothing(async_scheduling: bool) -> None:
    driver = Driver(async_scheduling=async_scheduling)
    driver.run("r", A, agent_hint=hint("s", ttl=300))
    before = driver.manager.stats()
    driver.add("never", B, agent_hint=hint("s", ttl=300))
    driver.scheduler.finish_requests("never", _aborted())
    driver.engine.run_until_idle()
    after = driver.manager.stats()
    assert (after.claimed_blocks, after.protected_blocks) == (
        before.claimed_blocks,
        before.protected_blocks,
    )
    driver.check_no_leak()


def test_a_block_with_output_in_flight_is_not_recorded(async_scheduling: bool) -> None:
    """Only what has been computed beyond doubt becomes a session's context."""
    driver = Driver(async_scheduling=async_scheduling)
    driver.run("r", A[:31], max_tokens=2, agent_hint=hint("s", ttl=300))
    # 31 prompt tokens and one output token were computed; the second was sampled.
    (context,) = driver.call("get_session", tenant="", session_id="s")["result"][
        "contexts"
    ]
    assert context["num_blocks"] == 2
    assert context["num_tokens"] == 32
    driver.check_no_leak()


def test_sliding_window_groups_are_served(async_scheduling: bool) -> None:
    driver = Driver(sliding_window=64, async_scheduling=async_scheduling)
    for number in range(6):
        tokens = STREAMS[number % 3][:160]
        driver.run(f"r{number}", tokens, agent_hint=hint(f"s{number % 3}", ttl=300))
    driver.edit("s1", {"type": "evict"})
    driver.check()
    driver.run("pressure", STREAMS[4][:300])
    driver.check_no_leak()


def test_blocks_behind_an_attention_window_are_not_held(
    async_scheduling: bool,
) -> None:
    """A long context of a window group holds the window, not all it ever had."""
    driver = Driver(
        sliding_window=64,
        async_scheduling=async_scheduling,
        num_blocks=128,
        max_num_batched_tokens=64,
    )
    driver.run("r1", STREAMS[0][:320], agent_hint=hint("s", ttl=300))
    driver.run("r2", STREAMS[0][:640], agent_hint=hint("s", ttl=300))
    # 40 blocks with full attention, and a window of four with what overlaps it.
    assert 40 <= driver.manager.stats().claimed_blocks <= 48
    driver.check_no_leak()


def _aborted() -> object:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
