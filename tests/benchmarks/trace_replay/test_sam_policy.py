from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.sam_policy import HintRules, SamPolicy
from benchmarks.trace_replay.server import VirtualServer
from sam_connector.core.types import EditType
from tests.benchmarks.trace_replay.rows import ring, row, workload

pytestmark = pytest.mark.vllm

RULES = HintRules(tool_ttl_s=1_000.0)


def test_every_turn_names_its_session_and_asks_for_retention() -> None:
    lead, child = workload(row("a", 0, 1, 100), row("a/1", 2, 3, 100, parent="a")).turns
    assert RULES.hint_with(lead) == {
        "session_id": "a",
        "cache_control": {"ttl": 1_000.0},
    }
    hint = RULES.hint_with(child)
    assert hint is not None
    assert hint["parent_session_id"] == "a"


def test_side_call_names_a_session_only_if_told_to() -> None:
    side = workload(row("a", 0, 9, 100), row("a", 1, 9, 1_000)).turns[0]
    assert RULES.hint_with(side) is None
    assert HintRules(name_side_calls=True, tool_ttl_s=None).hint_with(side) == {
        "session_id": "a"
    }


def test_waiting_lead_and_finished_agent() -> None:
    lead, child, last = workload(
        row("a", 0, 1, 100), row("a/1", 2, 3, 100, parent="a"), row("a", 9, 10, 300)
    ).turns
    assert [RULES.lease_after(turn) for turn in (lead, child, last)] == [
        0.0,
        None,
        None,
    ]
    assert RULES.edits_after(lead) == []
    assert [edit.type for edit in RULES.edits_after(child)] == [EditType.EVICT]
    assert HintRules(evict_at_end=False).edits_after(last) == []


def test_without_hints_every_request_is_served_as_by_stock() -> None:
    load = ring(4, 5, first_tokens=800)
    stock = VirtualServer(load, pool_tokens=3_600, policy=Policy()).run()
    policy = SamPolicy()
    ours = VirtualServer(load, pool_tokens=3_600, policy=policy).run()
    assert ours == stock
    assert policy.name == "ours_no_hints"
    assert policy.host.manager.stats().sessions == 0


def test_with_hints_nothing_is_left_behind() -> None:
    load = ring(4, 5, first_tokens=800)
    policy = SamPolicy(RULES)
    server = VirtualServer(load, pool_tokens=3_600, policy=policy)
    server.run()
    policy.host.manager.check_integrity()
    policy.host.pool.free_queue.check_integrity()
    stats = policy.host.manager.stats()
    assert stats.hinted_requests == 20
    assert (stats.running_requests, stats.protected_blocks) == (0, 0)
    assert policy.num_leases_broken() == stats.leases_broken


def test_hints_beat_lru_where_the_pool_holds_all_but_one() -> None:
    load = ring(4, 5, first_tokens=800)
    stock = VirtualServer(load, pool_tokens=3_600, policy=Policy()).run()
    hints = VirtualServer(load, pool_tokens=3_600, policy=SamPolicy(RULES)).run()
    assert sum(s.cached_tokens for s in hints.served) > sum(
        s.cached_tokens for s in stock.served
    )
