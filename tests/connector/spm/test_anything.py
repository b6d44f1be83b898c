"""Requests, edits, resets and failures in any order: the bytes are always right.

The driver compares, after every step and on every rank, what requests read and could
hit with what their tokens say.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.connector.driving import STREAMS, hint
from tests.connector.spm.driving import SpmDriver
from tests.connector.spm.inner_connectors import RAISING

pytestmark = pytest.mark.vllm

NUM_ACTIONS = 120
SESSIONS = ("a", "b", "c")
#: What a connector that loads asynchronously may raise in without a request noticing.
FAULTS = ("start_load_kv", "get_num_new_matched_tokens")


def act(driver: SpmDriver, chance: random.Random, number: int) -> None:
    session = chance.choice(SESSIONS)
    match chance.randrange(10):
        case 0 | 1 | 2:
            tokens = STREAMS[chance.randrange(3)][: chance.randrange(20, 400)]
            hinted = hint(session, ttl=chance.choice([None, 0, 60]))
            driver.add(
                f"r{number}",
                tokens,
                max_tokens=chance.randrange(1, 20),
                agent_hint=hinted if chance.random() < 0.8 else None,
                cache_salt="salt" if chance.random() < 0.1 else None,
            )
        case 3 | 4 | 5:
            kind = chance.choice(["offload", "prefetch", "prefetch", "evict"])
            driver.edit(session, {"type": kind})
        case 6:
            driver.scheduler.reset_prefix_cache()
        case 7:
            if driver.scheduler.requests:
                driver.engine.abort(chance.choice(list(driver.scheduler.requests)))
        case 8:
            if chance.random() < 0.1:
                driver.call("free_session", tenant="", session_id=session)
        case 9:
            if driver.inner.__class__.__name__ == "FaultyToy":
                RAISING.clear()
                RAISING.update(chance.sample(FAULTS, chance.randrange(2)))
    driver.step(chance.randrange(3))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("inner", "options"),
    [
        ("FaultyToy", {}),
        ("FaultyToy", {"async_scheduling": True}),
        ("FaultyToy", {"tensor_parallel_size": 2, "report_lag": {1: 2}}),
        ("SequenceToy", {}),
        ("SequenceToy", {"async_scheduling": True}),
        ("SequenceToy", {"tensor_parallel_size": 2, "report_lag": {1: 2}}),
    ],
)
def test_anything_may_happen(inner: str, options: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    config = {"max_prefetch_blocks": 8} if inner == "FaultyToy" else {}
    with SpmDriver(
        inner,
        extra_config={"failed_retry_s": 1e-9, **config},
        inner_config={"loads_without_metadata": True},
        max_num_batched_tokens=256,
        num_blocks=72,
        **options,
    ) as driver:
        for number in range(NUM_ACTIONS):
            act(driver, chance, number)
        RAISING.clear()
        driver.engine.run_until_idle(max_steps=2_000)
        driver.check_no_leak()
