"""Situations that tests of the tier start from, and what must hold in all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.scheduler_harness import expected_output, make_request
from sam_connector.core.slot_pool import Content
from sam_connector.transfer.contract import CopyJob, Direction
from tests.connector.copy_gate import CopyGate
from tests.connector.driving import BLOCK_SIZE, STREAMS, TieredDriver

STORE, LOAD = Direction.STORE, Direction.LOAD

#: Ten blocks, of which a request for them alone computes the last itself.
PROMPT = STREAMS[0][: 10 * BLOCK_SIZE]

#: Engines that differ in what is in flight between two calls of the connector.
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def saving(policy: str = "all", **options: Any) -> TieredDriver:
    """A driver with a save policy; ``all`` unless it says another."""
    more = {"save_policy": policy, **options.pop("extra_config", {})}
    return TieredDriver(extra_config=more, **options)


def saved(*prompts: list[int], **options: Any) -> TieredDriver:
    """The tier has all of the prompts and the engine has nothing.

    Args:
        *prompts: ``PROMPT`` if there are none.
        **options: of the driver.
    """
    driver = saving(**options)
    for number, prompt in enumerate(prompts or (PROMPT,)):
        run(driver, f"save{number}", prompt)
    lose_engine_cache(driver)
    return driver


def lose_engine_cache(driver: TieredDriver) -> None:
    assert driver.scheduler.reset_prefix_cache()
    assert not any(b.block_hash for b in driver.pool.blocks)


def run(
    driver: TieredDriver, request_id: str, prompt: list[int], max_tokens: int = 1
) -> None:
    """Runs one request and all copies that follow from it; checks its tokens."""
    driver.add(request_id, prompt, max_tokens=max_tokens)
    finish(driver)
    assert_answered(driver, request_id, prompt, max_tokens)


def run_without_tier(driver: TieredDriver, request_id: str, prompt: list[int]) -> None:
    """Only the engine has the prompt's blocks from it."""
    driver.tier.is_abandoned = True
    run(driver, request_id, prompt)
    driver.tier.is_abandoned = False


def finish(driver: TieredDriver, max_steps: int = 3_000) -> None:
    for _ in range(max_steps):
        if driver.engine.is_idle:
            return
        step(driver)
    raise AssertionError("never idle")


def step(driver: TieredDriver, count: int = 1) -> None:
    for _ in range(count):
        driver.step()
        check_no_conflict(driver)


def assert_answered(
    driver: TieredDriver, request_id: str, prompt: list[int], max_tokens: int
) -> None:
    """The request got the tokens it would have got without a connector."""
    expected = expected_output(request_id, len(prompt), max_tokens)
    assert driver.engine.outputs[request_id] == expected, request_id


def check_no_conflict(driver: TieredDriver) -> None:
    """No copy under way writes what another one reads or writes."""
    jobs = driver.tier.state.jobs.open_jobs().values()
    blocks = [b.block_id for job in jobs if job.direction is LOAD for b in job.blocks]
    slots = [s.index for job in jobs if job.direction is STORE for s in job.slots]
    assert len(blocks) == len(set(blocks)), "a block is loaded twice"
    assert len(slots) == len(set(slots)), "a slot is written twice"
    for job in jobs:
        if job.direction is LOAD:
            assert not {s.index for s in job.slots} & set(slots), job
        else:
            assert not {b.block_id for b in job.blocks} & set(blocks), job


def hold(driver: TieredDriver) -> None:
    """Copies end only when they are released, from now on."""
    for gate in driver.ranks.gates:
        gate.is_holding = True


def jobs_of(gate: CopyGate, direction: Direction) -> list[CopyJob]:
    return [job for job in gate.history if job.direction is direction]


def num_blocks(jobs: list[CopyJob]) -> int:
    return sum(len(part.block_ids) for job in jobs for part in job.parts)


def connector_of(driver: TieredDriver) -> Any:
    return driver.scheduler.connector


def matched(driver: TieredDriver, request: Any, num_computed: int = 0) -> Any:
    """What the connector answers to vLLM's question."""
    return connector_of(driver).get_num_new_matched_tokens(request, num_computed)


def waiting_request(prompt: list[int], **options: Any) -> Any:
    """A request that no scheduler has seen."""
    return make_request("waiting", prompt, **options)


def contents_of(driver: TieredDriver, prompt: list[int]) -> list[Content]:
    """What the full blocks of a prompt are called, in all groups, in order."""
    chains = driver.tier._chains
    request = waiting_request(prompt)
    return [
        (group_id, block_hash)
        for group_id in chains.block_sizes
        for block_hash in chains.hashes(request, group_id)
    ]


def tier_has(driver: TieredDriver, prompt: list[int]) -> int:
    """How many blocks of a prompt the tier has."""
    return sum(c in driver.tier.state.slots for c in contents_of(driver, prompt))


def account(driver: TieredDriver) -> Mapping[str, object]:
    """Everything that a look-up could have changed."""
    slots = driver.tier.state.slots.free_queue.get_all_free_blocks()
    return {
        **driver.tier.stats(),
        "free slots in order": [slot.index for slot in slots],
        "free blocks in order": driver.free_ids(),
        "claimed": driver.manager.stats().claimed_blocks,
    }


def on_allocation(driver: TieredDriver, call: Callable[[], None]) -> None:
    """Calls back once, between a look-up and ``update_state_after_alloc``."""
    manager: Any = driver.scheduler.kv_cache_manager
    allocate_slots = manager.allocate_slots
    was_called = False

    def allocate(*args: Any, **kwargs: Any) -> Any:
        nonlocal was_called
        blocks = allocate_slots(*args, **kwargs)
        if not was_called:
            was_called = True
            call()
        return blocks

    manager.allocate_slots = allocate
