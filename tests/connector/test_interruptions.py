"""Aborts, preemptions, resets, control calls and time, at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sam_connector.connector.scheduler import SchedulerSide
from sam_connector.core.clock import ManualClock
from tests.connector.driving import STREAMS, Driver

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

SESSIONS = [f"s{number}" for number in range(6)]


def random_hint(rng: random.Random) -> dict[str, object] | None:
    if rng.random() < 0.2:
        return None
    hint: dict[str, object] = {"session_id": rng.choice(SESSIONS)}
    if rng.random() < 0.3:
        hint["parent_session_id"] = rng.choice(SESSIONS)
    if rng.random() < 0.6:
        control: dict[str, object] = {"ttl": rng.choice([0, 1, 5, 60])}
        if rng.random() < 0.3:
            control["block_offset"] = rng.randrange(1, 12)
        hint["cache_control"] = control
    if rng.random() < 0.2:
        kind = rng.choice(["evict", "offload", "prefetch"])
        edit: dict[str, object] = {"type": kind}
        if rng.random() < 0.4:
            edit |= {"block_start": rng.randrange(4), "block_end": rng.randrange(5, 9)}
        hint["context_management"] = {"edits": [edit]}
    return hint


def add_and_abort(
    driver: Driver,
    rng: random.Random,
    request_id: str,
    prompts: dict[str, tuple[list[int], int]],
) -> None:
    """Perhaps a new request, noted in ``prompts``, and perhaps an end to another."""
    if rng.random() < 0.5:
        tokens = rng.choice(STREAMS)[: rng.randrange(1, 400)]
        max_tokens = rng.randrange(1, 60)
        prompts[request_id] = tokens, max_tokens
        driver.add(
            request_id, tokens, max_tokens=max_tokens, agent_hint=random_hint(rng)
        )
    if rng.random() < 0.1 and driver.scheduler.requests:
        driver.engine.abort(rng.choice(sorted(driver.scheduler.requests)))


def control_call(driver: Driver, rng: random.Random) -> None:
    session_id = rng.choice(SESSIONS)
    target = {"tenant": "", "session_id": session_id}
    edit = rng.choice(["evict", "offload", "prefetch"])
    calls: list[Callable[[], object]] = [
        lambda: driver.edit(session_id, {"type": edit}),
        lambda: driver.edit(
            session_id, {"type": "evict", "block_start": 1, "block_end": 3}
        ),
        lambda: driver.call(
            "set_lease",
            ttl=rng.choice([0, 2, 30]),
            expected_resume_s=rng.choice([None, 1, 20]),
            **target,
        ),
        lambda: driver.call("free_session", tree=rng.random() < 0.5, **target),
        lambda: driver.call("get_session", **target),
        lambda: driver.call("list_sessions", tenant="", limit=3),
        lambda: driver.call("get_stats"),
        lambda: driver.call("reset"),
    ]
    rng.choices(calls, weights=[4, 2, 3, 2, 1, 1, 1, 0.3])[0]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(1_000.0)
    monkeypatch.setattr("sam_connector.vllm_adapter.host.MonotonicClock", lambda: clock)
    return clock


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_moment(
    seed: int, async_scheduling: bool, clock: ManualClock
) -> None:
    """Same tokens as without us, every account right after every step, no leak.

    The pool is small enough for preemptions and short enough of blocks that leases
    are broken.
    """
    rng = random.Random(seed)
    options = {
        "num_blocks": 48,
        "async_scheduling": async_scheduling,
        "max_num_batched_tokens": 96,
    }
    driver = Driver(
        extra_config={"ranges": bool(seed % 2), "idle_ttl_s": 20}, **options
    )
    prompts: dict[str, tuple[list[int], int]] = {}
    for number in range(120):
        add_and_abort(driver, rng, f"r{number}", prompts)
        if rng.random() < 0.05:
            driver.scheduler.reset_prefix_cache(
                reset_running_requests=rng.random() < 0.5 and not async_scheduling,
                reset_connector=rng.random() < 0.5,
            )
        if rng.random() < 0.3:
            control_call(driver, rng)
        clock.advance(rng.choice([0.0, 0.01, 0.5, 3.0]))
        for _ in range(rng.randrange(5)):
            driver.engine.step()
            driver.check()
    driver.engine.run_until_idle()
    stock = Driver("null", **options)
    for request_id in driver.engine.finished:
        if driver.engine.finished[request_id] == "length":
            tokens, max_tokens = prompts[request_id]
            stock.add(request_id, tokens, max_tokens=max_tokens)
            stock.engine.run_until_idle()
            assert (
                driver.engine.outputs[request_id] == (stock.engine.outputs[request_id])
            )
    driver.check_no_leak()


def test_preemption_keeps_the_prefix_associated() -> None:
    driver = Driver(num_blocks=24, max_num_batched_tokens=64)
    driver.add("a", STREAMS[0][:128], max_tokens=120, agent_hint={"session_id": "a"})
    driver.add("b", STREAMS[1][:128], max_tokens=120, agent_hint={"session_id": "b"})
    preempted = False
    while not driver.engine.is_idle:
        driver.engine.step()
        driver.check()
        preempted |= any(
            request.num_preemptions for request in driver.scheduler.requests.values()
        )
    assert preempted
    driver.check_no_leak()


def test_every_reset_is_noticed() -> None:
    """A reset that vLLM tells no connector about is seen all the same."""
    driver = Driver()
    driver.run("r", STREAMS[0][:160], agent_hint={"session_id": "s"})
    assert driver.manager.stats().claimed_blocks == 10
    assert driver.scheduler.reset_prefix_cache(reset_connector=False)
    assert driver.call("get_stats")["result"]["claimed_blocks"] == 0
    assert driver.call("get_session", tenant="", session_id="s")["found"] is False
    driver.check_no_leak()


@pytest.mark.parametrize("op", ["set_lease", "free_session"])
def test_a_control_call_right_after_a_reset_finds_no_session(op: str) -> None:
    driver = Driver()
    driver.run("r", STREAMS[0][:160], agent_hint={"session_id": "s"})
    assert driver.scheduler.reset_prefix_cache()
    more = {"ttl": 60} if op == "set_lease" else {}
    assert driver.call(op, tenant="", session_id="s", **more)["found"] is False
    driver.check_no_leak()


def test_an_internal_error_switches_hints_off_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    driver.run("before", STREAMS[0][:160], agent_hint={"session_id": "s"})

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(driver.manager, "on_request_finished", fail)
    driver.add("during", STREAMS[1][:160], agent_hint={"session_id": "s"})
    driver.engine.run_until_idle()
    assert driver.side.host is None
    driver.add("after", STREAMS[0][:160], agent_hint={"session_id": "s"}, max_tokens=3)
    driver.engine.run_until_idle()
    assert len(driver.engine.outputs["after"]) == 3
    driver.pool.free_block_queue.check_integrity()
    reply = driver.call("get_session", tenant="", session_id="s")
    assert reply["ok"] is False
    assert "internal error" in reply["reason"]


@pytest.mark.parametrize("callback", ["relieve", "on_reassigned"])
def test_an_error_during_an_allocation_does_not_reach_the_pool(
    callback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(num_blocks=24)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    host = driver.side.host
    assert host is not None
    if callback == "relieve":
        monkeypatch.setattr(host.manager, "relieve", fail)
    else:
        queue = host.pool.free_queue
        queue.on_reassigned = lambda *a: driver.side.guarded(fail, *a)
    for number, stream in enumerate(STREAMS):
        driver.add(f"r{number}", stream[:160], agent_hint={"session_id": f"s{number}"})
        driver.engine.run_until_idle()
    assert isinstance(driver.side, SchedulerSide)
    assert driver.side.host is None
    assert len(driver.engine.outputs) == len(STREAMS)
    driver.pool.free_block_queue.check_integrity()
