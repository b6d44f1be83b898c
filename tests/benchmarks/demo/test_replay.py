from __future__ import annotations

import asyncio

from benchmarks.demo.harness import Harness
from benchmarks.demo.policy import AgentPolicy
from benchmarks.demo.replay import Replay, RunRecord
from tests.benchmarks.demo.fake_server import LEAD_AND_CHILDREN, FakeServer, plan

LEAD = "r:a:lead"


def replay(
    server: FakeServer, *, speaks: bool, gap_divisor: float = 1000.0
) -> RunRecord:
    workload = plan(LEAD_AND_CHILDREN, gap_divisor=gap_divisor)

    async def run() -> RunRecord:
        async with server.client() as client:
            harness = Harness(
                client, AgentPolicy(workload.turns, "r") if speaks else None
            )
            return await Replay(
                client, workload, harness=harness, report=lambda line: None
            ).run()

    return asyncio.run(run())


def test_every_turn_is_answered_and_counted() -> None:
    record = replay(FakeServer(), speaks=False)
    assert sorted(record.results) == [0, 1, 2, 3, 4, 5]
    assert record.results[4].cached_tokens == 100


def test_a_waiting_lead_is_offloaded_before_its_children_are_done() -> None:
    server = FakeServer()
    replay(server, speaks=True)
    offload = server.log.index(("edit", LEAD, "offload"))
    assert server.log.index(("generate", LEAD)) < offload
    assert server.log[offload - 1] == ("lease", LEAD, "0")
    assert offload < server.log.index(("edit", "r:a:sub-1", "evict"))


def test_a_lead_is_prefetched_after_its_last_child_and_before_its_own_pause() -> None:
    """The pause is 0.1 s; a prefetch after it would come behind the request."""
    server = FakeServer()
    replay(server, speaks=True, gap_divisor=10.0)
    prefetch = server.log.index(("edit", LEAD, "prefetch"))
    children = [i for i, (what, who, *_) in enumerate(server.log) if "sub" in who]
    requests = [i for i, entry in enumerate(server.log) if entry == ("generate", LEAD)]
    assert max(children) < prefetch < requests[1]


def test_a_refused_control_call_fails_nothing() -> None:
    server = FakeServer()
    server.refused = {"/lease": 404, "/edits": 503}
    assert len(replay(server, speaks=True).results) == 6


def test_preemptions_are_those_of_this_replay() -> None:
    server = FakeServer()
    server.num_preemptions = 5
    assert replay(server, speaks=False).num_preemptions == 0
