"""The harness behaves like an engine: same tokens, two batches, no leaks."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.scheduler_harness import (
    FakeEngine,
    check_idle_pool,
    complete,
    expected_output,
    launch,
    make_request,
    make_scheduler,
    run_step,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("connector", [None, "null", "sam"])
def test_answers_depend_on_the_request_alone(
    connector: str | None, async_scheduling: bool
) -> None:
    # 12 requests of up to 111 tokens do not fit 40 blocks: some are preempted.
    scheduler = make_scheduler(
        connector,
        num_blocks=40,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=64,
    )
    engine = FakeEngine(scheduler)
    for i in range(12):
        scheduler.add_request(
            make_request(f"r{i}", range(i % 3 * 100, i % 3 * 100 + 70), max_tokens=40)
        )
    outputs = engine.run_until_idle()
    assert outputs == {f"r{i}": expected_output(f"r{i}", 70, 40) for i in range(12)}
    assert set(engine.finished) == set(outputs)
    check_idle_pool(scheduler)


def test_second_request_hits_prompt_and_output_of_the_first() -> None:
    scheduler = make_scheduler(num_blocks=64)
    engine = FakeEngine(scheduler)
    scheduler.add_request(make_request("a", range(100), max_tokens=30))
    tokens = [*range(100), *engine.run_until_idle()["a"]]
    blocks, num_cached, _ = scheduler.kv_cache_manager.get_computed_blocks(
        make_request("b", tokens)
    )
    # 129 tokens have KV: the last sampled one was never fed back.
    assert num_cached == 128
    assert len(blocks.blocks[0]) == 8


def test_known_prompt_hashes_are_the_hashes() -> None:
    first = make_request("a", range(100))
    second = make_request("b", range(100), prompt_hashes=first.block_hashes)
    assert second.block_hashes == first.block_hashes
    for request in (first, second):
        request.append_output_token_ids(list(range(30)))
    assert second.block_hashes == first.block_hashes
    assert len(first.block_hashes) == 8


def test_async_scheduling_keeps_two_batches_in_flight() -> None:
    scheduler = make_scheduler("null", num_blocks=64, async_scheduling=True)
    engine = FakeEngine(scheduler)
    assert engine.max_in_flight == 2
    scheduler.add_request(make_request("a", range(40), max_tokens=4))
    assert engine.step() == {}
    assert len(engine.in_flight) == 1
    assert engine.step()[0].outputs[0].new_token_ids == expected_output("a", 40, 1)
    assert len(engine.in_flight) == 1
    engine.run_until_idle()
    check_idle_pool(scheduler)


def test_blocks_of_an_aborted_request_outlive_the_batch_in_flight() -> None:
    scheduler = make_scheduler("null", num_blocks=64, async_scheduling=True)
    engine = FakeEngine(scheduler)
    scheduler.add_request(make_request("a", range(160), max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.step()
    assert scheduler.deferred_frees
    engine.complete_oldest()
    assert not scheduler.deferred_frees
    engine.run_until_idle()
    check_idle_pool(scheduler)
    assert engine.finished == {}


def test_launches_may_be_completed_one_by_one() -> None:
    scheduler = make_scheduler("null", num_blocks=64, async_scheduling=True)
    scheduler.add_request(make_request("a", range(40), max_tokens=3))
    first, second = launch(scheduler), launch(scheduler)
    complete(scheduler, first)
    outputs = complete(scheduler, second)
    assert outputs[0].outputs[0].new_token_ids == expected_output("a", 40, 2)[1:]


def test_long_prompts_are_chunked() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=32)
    scheduler.add_request(make_request("a", range(100), max_tokens=1))
    outputs = [run_step(scheduler) for _ in range(4)]
    assert [bool(step) for step in outputs] == [False, False, False, True]


def test_two_groups_with_a_sliding_window() -> None:
    scheduler = make_scheduler("sam", num_blocks=400, sliding_window=64)
    scheduler.add_request(make_request("a", range(1_000), max_tokens=10))
    engine = FakeEngine(scheduler)
    assert engine.run_until_idle()["a"] == expected_output("a", 1_000, 10)
    check_idle_pool(scheduler)


def test_the_workers_connector_speaks_once_per_step() -> None:
    calls = []

    def worker(scheduler_output: object) -> None:
        calls.append(scheduler_output)

    engine = FakeEngine(make_scheduler("null", num_blocks=64), worker)
    engine.scheduler.add_request(make_request("a", range(40), max_tokens=3))
    engine.run_until_idle()
    assert len(calls) == engine.num_steps


def test_never_idle_is_an_error() -> None:
    engine = FakeEngine(make_scheduler(num_blocks=64))
    engine.scheduler.add_request(make_request("a", range(40), max_tokens=100))
    with pytest.raises(RuntimeError, match="not idle after 5 steps"):
        engine.run_until_idle(max_steps=5)


def test_leak_check_sees_a_held_block() -> None:
    scheduler = make_scheduler(num_blocks=64)
    blocks = scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    with pytest.raises(AssertionError):
        check_idle_pool(scheduler)
    scheduler.kv_cache_manager.block_pool.free_blocks(blocks)
    check_idle_pool(scheduler)
