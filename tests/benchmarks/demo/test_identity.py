from __future__ import annotations

import asyncio

from benchmarks.demo.harness import Harness
from benchmarks.demo.identity import (
    IdentityRecord,
    begun_before,
    generate_one_by_one,
    identical,
)
from benchmarks.demo.policy import AgentPolicy
from benchmarks.demo.pool_run import IDENTITY_TURNS
from benchmarks.demo.server import demo_workload
from benchmarks.demo.workload import Next
from tests.benchmarks.demo.fake_server import LEAD_AND_CHILDREN, FakeServer, plan

WORKLOAD = plan(LEAD_AND_CHILDREN)


def generate(server: FakeServer) -> IdentityRecord:
    async def run() -> IdentityRecord:
        async with server.client() as client:
            return await generate_one_by_one(
                client,
                WORKLOAD,
                WORKLOAD.turns[3:5],
                harness=Harness(client, AgentPolicy(WORKLOAD.turns, "r")),
                report=lambda line: None,
            )

    return asyncio.run(run())


def test_a_lead_that_resumes_has_begun_and_was_offloaded_and_is_prefetched() -> None:
    server = FakeServer()
    record = generate(server)
    assert sorted(record.tokens) == [3, 4]
    assert server.log == [
        ("generate", "r:a:lead"),
        ("lease", "r:a:lead", "0"),
        ("edit", "r:a:lead", "offload"),
        ("generate", "r:a:sub-1"),
        ("edit", "r:a:sub-1", "evict"),
        ("edit", "r:a:lead", "prefetch"),
        ("generate", "r:a:lead"),
    ]
    assert record.prompt_tokens == 60 + 150
    # The lead's first prompt, and nothing of the child's that was not run before.
    assert record.cached_tokens == 100


def test_one_different_token_is_found() -> None:
    servers = [FakeServer() for _ in range(3)]
    servers[2].drift = 1
    records = [generate(server) for server in servers]
    assert identical(records[:2]) == [True, True]
    assert identical(records) == [False, False]
    records[2].tokens[4] = records[0].tokens[4]
    assert identical(records) == [False, True]
    assert identical([]) == []


def test_the_demo_compares_46_turns_that_three_leads_resume_among() -> None:
    workload = demo_workload()
    turns = workload.turns[IDENTITY_TURNS]
    assert len(turns) == 46
    begun = begun_before(workload, turns)
    assert len(begun) == 3
    assert {turn.next for turn in begun} == {Next.CHILDREN}
