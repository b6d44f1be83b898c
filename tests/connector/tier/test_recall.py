"""A session moves from one engine to another, on every kind of engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.scheduler_harness import expected_output
from tests.connector.driving import BLOCK_SIZE, STREAMS, TieredDriver, hint
from tests.connector.tier import flaky_store

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]

PROMPT = STREAMS[0][:200]
NUM_BLOCKS = 12

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


@pytest.fixture(params=MODES)
def engines(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[TieredDriver, TieredDriver]]:
    """Two engines of one kind on one store."""
    name = f"recall-{time.monotonic_ns()}"
    with contextlib.ExitStack() as stack:
        a, b = (
            stack.enter_context(make(f"memory://{name}", **MODES[request.param]))
            for _ in "ab"
        )
        b.ranks._marks = a.ranks._marks  # a hash stands for the same on both
        yield a, b


def make(
    store: str,
    *,
    blocks_per_value: int = 1,
    store_policy: str = "on_demand",
    ranges: bool = False,
    **options: Any,
) -> TieredDriver:
    return TieredDriver(
        extra_config={
            "store": store,
            "store_policy": store_policy,
            "ranges": ranges,
            "store_value_bytes": blocks_per_value * 512,
            "store_lookup_timeout_s": 10,
            "store_timeout_s": 10,
        },
        num_blocks=64,
        **options,
    )


def edit(
    driver: TieredDriver, session_id: str, kind: str, **more: Any
) -> dict[str, Any]:
    reply = driver.wait(
        "apply_edits",
        max_steps=100_000,
        tenant="",
        session_id=session_id,
        edits=[{"type": kind, **more}],
        wait_s=30,
    )
    [result] = reply["result"]["results"]
    return dict(result)


def serve(driver: TieredDriver, request_id: str, session_id: str | None) -> None:
    more = {} if session_id is None else {"agent_hint": hint(session_id, ttl=60)}
    tokens = driver.run(request_id, PROMPT, max_tokens=4, **more)
    assert tokens == expected_output(request_id, len(PROMPT), 4)


def stat(driver: TieredDriver, name: str) -> int:
    return int(driver.call("get_stats")["result"][name])


def test_a_session_is_prefetched_where_it_never_was(
    engines: tuple[TieredDriver, TieredDriver],
) -> None:
    a, b = engines
    serve(a, "first", "s")
    assert edit(a, "s", "offload")["status"] == "completed"
    result = edit(b, "s", "prefetch")
    assert result["status"] == "completed"
    assert result["blocks"]["done"] == NUM_BLOCKS
    request = b.add("second", PROMPT, max_tokens=4, agent_hint=hint("s", ttl=60))
    assert len(b.resident(request)) == NUM_BLOCKS
    b.engine.run_until_idle()
    assert stat(b, "external_hit_tokens") == 0  # there was no need to
    known = b.call("get_session", tenant="", session_id="s")["result"]
    assert known["blocks"]["store"] == NUM_BLOCKS
    a.check_no_leak()
    b.check_no_leak()


def test_a_request_is_served_from_the_store(
    engines: tuple[TieredDriver, TieredDriver],
) -> None:
    a, b = engines
    serve(a, "first", "s")
    edit(a, "s", "offload")
    serve(b, "second", None)
    assert stat(b, "external_hit_tokens") == NUM_BLOCKS * BLOCK_SIZE
    assert stat(b, "store_read_values") == NUM_BLOCKS
    b.check_no_leak()


def test_what_a_session_has_said_is_written_as_it_says_it() -> None:
    """``store_policy: sessions``: nobody has to ask for an offload."""
    with (
        make("memory://said", store_policy="sessions") as a,
        make("memory://said") as b,
    ):
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        for _ in range(1_000):
            if stat(a, "store_manifests_written"):
                break
            a.step()
            time.sleep(0.001)
        assert edit(b, "s", "prefetch")["status"] == "completed"


@pytest.mark.parametrize("blocks_per_value", [1, 5])
def test_blocks_are_grouped_to_values(blocks_per_value: int) -> None:
    name = f"memory://grouped-{blocks_per_value}"
    with (
        make(name, blocks_per_value=blocks_per_value) as a,
        make(name, blocks_per_value=blocks_per_value) as b,
    ):
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        edit(a, "s", "offload")
        assert stat(a, "store_write_values") == -(-NUM_BLOCKS // blocks_per_value)
        # The last value is not whole: a session's manifest names it, a request
        # cannot know of it.
        assert edit(b, "s", "prefetch")["blocks"]["done"] == NUM_BLOCKS


def test_engines_that_group_otherwise_do_not_meet() -> None:
    with (
        make("memory://otherwise", blocks_per_value=1) as a,
        make("memory://otherwise", blocks_per_value=2) as b,
    ):
        serve(a, "first", "s")
        edit(a, "s", "offload")
        assert edit(b, "s", "prefetch")["status"] == "not_found"


def test_a_session_that_was_evicted_elsewhere_is_found_nowhere() -> None:
    with make("memory://evicted") as a, make("memory://evicted") as b:
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        edit(a, "s", "offload")
        assert edit(b, "s", "evict")["status"] == "completed"
        assert edit(b, "s", "prefetch")["status"] == "not_found"
        assert edit(b, "s", "evict")["status"] == "not_found"
        serve(b, "second", None)
        assert stat(b, "external_hit_tokens") > 0


def test_a_purge_deletes_what_no_other_session_shares() -> None:
    with make("memory://purged") as a, make("memory://purged") as b:
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        fork = [*PROMPT[: 6 * BLOCK_SIZE], *STREAMS[1][:100]]
        a.run("fork", fork, max_tokens=4, agent_hint=hint("u", ttl=60))
        edit(a, "s", "offload")
        edit(a, "u", "offload")
        assert edit(a, "s", "evict", purge=True)["status"] == "completed"
        for _ in range(200):
            a.step()
            time.sleep(0.001)
        serve(b, "second", None)
        assert stat(b, "external_hit_tokens") == 6 * BLOCK_SIZE
        # Here as well: what is shared stays, what was its own is forgotten.
        request = a.add("third", PROMPT, max_tokens=1)
        assert len(a.resident(request)) <= 6
        a.engine.run_until_idle()
        a.check_no_leak()


def test_a_reset_makes_what_is_stored_unreadable_and_keeps_it_if_told_to() -> None:
    with make("memory://reset") as a:
        serve(a, "first", "s")
        edit(a, "s", "offload")
        a.call("reset", keep_store=True)
        a.scheduler.reset_prefix_cache()
        assert edit(a, "s", "prefetch")["status"] == "completed"
        a.call("reset")
        a.scheduler.reset_prefix_cache()
        assert edit(a, "s", "prefetch")["status"] == "not_found"
        before = stat(a, "external_hit_tokens")
        serve(a, "second", None)
        assert stat(a, "external_hit_tokens") == before


def test_d15_an_offload_is_not_done_until_the_store_has_it() -> None:
    flaky_store.register()
    with make("flaky://never?seed=1&trouble=1") as a:
        serve(a, "first", "s")
        result = edit(a, "s", "offload")
        assert result["status"] == "rejected"
        assert "store" in result["reason"]
        assert result["blocks"]["reclaimed"] == 0
        # Local retention is as it was.
        session = a.call("get_session", tenant="", session_id="s")["result"]
        assert session["blocks"]["gpu"] == NUM_BLOCKS
        assert session["lease_s"] > 0
        a.check_no_leak()


def test_a_request_whose_blocks_do_not_arrive_computes() -> None:
    flaky_store.register()
    with (
        make("flaky://lost?seed=1") as a,
        make("flaky://lost?seed=1") as b,
    ):
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        edit(a, "s", "offload")
        for worker in b.ranks.workers:
            worker.worker_side._io._store._store._trouble = 1.0
        serve(b, "second", None)
        assert stat(b, "failed_loads") == 1
        b.check_no_leak()


def test_a_client_that_leaves_while_its_blocks_are_on_their_way() -> None:
    flaky_store.register()
    with make("flaky://left?seed=2") as a, make("flaky://left?seed=2") as b:
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        edit(a, "s", "offload")
        for number in range(20):
            b.add(f"r{number}", PROMPT, max_tokens=4)
            b.step(number % 4 + 1)
            b.engine.abort(f"r{number}")
            b.step()
            b.call("reset", keep_store=True)
        b.engine.run_until_idle()
        for _ in range(200):
            b.step()
            time.sleep(0.001)
        b.check_no_leak()


def test_h01_another_salt_or_adapter_is_other_content() -> None:
    """Both are in vLLM's block hash, and nothing but that names a value."""
    from vllm.lora.request import LoRARequest

    with make("memory://salted") as a, make("memory://salted") as b:
        b.ranks._marks = a.ranks._marks
        serve(a, "first", "s")
        edit(a, "s", "offload")
        b.add("salted", PROMPT, max_tokens=1, cache_salt="x")
        b.engine.run_until_idle()
        assert stat(b, "external_hit_tokens") == 0
        plain = b.add("plain", PROMPT, max_tokens=1)
        b.engine.run_until_idle()
        assert stat(b, "external_hit_tokens") > 0
        # One request of the same tokens under an adapter of that name.
        adapted = b.add("adapted", PROMPT, max_tokens=1)
        adapted.lora_request = LoRARequest("x", 1, "/nowhere")
        adapted.block_hashes = []
        adapted.update_block_hashes()
        assert set(adapted.block_hashes).isdisjoint(plain.block_hashes)
        b.engine.abort("adapted")
        b.step(2)
