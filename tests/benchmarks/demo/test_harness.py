from __future__ import annotations

import asyncio

import httpx

from benchmarks.demo.client import DemoClient
from benchmarks.demo.harness import Harness, num_failed
from benchmarks.demo.policy import AgentPolicy
from tests.benchmarks.demo.fake_server import LEAD_AND_CHILDREN, FakeServer, plan

WORKLOAD = plan(LEAD_AND_CHILDREN)
FIRST, RESUMED, LAST = (WORKLOAD.turns[i] for i in (0, 4, 5))


def after(client: DemoClient, *, speaks: bool = True) -> Harness:
    """A harness after the first turn, the wait for the children, and the last."""

    async def run() -> Harness:
        async with client:
            harness = Harness(
                client, AgentPolicy(WORKLOAD.turns, "r") if speaks else None
            )
            await harness.on_ready(FIRST)
            await harness.on_answer(FIRST)
            await harness.on_ready(RESUMED)
            await harness.on_answer(RESUMED)
            await harness.on_ready(LAST)
            await harness.on_answer(LAST)
        return harness

    return asyncio.run(run())


def test_says_what_the_policy_decides_in_that_order() -> None:
    server = FakeServer()
    harness = after(server.client())
    assert server.controls == [
        ("lease", "r:a:lead", "0"),
        ("edit", "r:a:lead", "offload"),
        ("edit", "r:a:lead", "prefetch"),
        ("edit", "r:a:lead", "evict"),
    ]
    assert harness.hint(FIRST) is not None
    assert harness.outcomes.total() == 4
    assert num_failed(harness.outcomes) == 0


def test_a_silent_harness_says_nothing() -> None:
    server = FakeServer()
    harness = after(server.client(), speaks=False)
    assert server.log == []
    assert harness.hint(FIRST) is None


def test_an_unknown_session_is_counted_and_the_rest_still_said() -> None:
    server = FakeServer()
    server.refused["/lease"] = 404
    server.statuses = {"offload": "accepted", "prefetch": "not_found"}
    harness = after(server.client())
    assert harness.outcomes == {
        "lease/404": 1,
        "offload/accepted": 1,
        "prefetch/not_found": 1,
        "evict/completed": 1,
    }
    assert num_failed(harness.outcomes) == 2


def test_a_lost_connection_is_counted() -> None:
    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("lost", request=request)

    client = DemoClient("http://fake", transport=httpx.MockTransport(lose))
    harness = after(client)
    assert harness.outcomes["offload/ReadError"] == 1
    assert num_failed(harness.outcomes) == 4
