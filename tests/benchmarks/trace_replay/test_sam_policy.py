from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.hints import HintRules
from benchmarks.trace_replay.policies import Policy
from benchmarks.trace_replay.sam_policy import SamPolicy
from benchmarks.trace_replay.server import VirtualServer
from tests.benchmarks.trace_replay.rows import SERVICE, ring, row, workload

pytestmark = pytest.mark.vllm

RULES = HintRules(tool_ttl_s=1_000.0)
TIER = {"host_bytes": 40_000 * SERVICE.kv_bytes_per_token}


def test_without_hints_every_request_is_served_as_by_stock() -> None:
    load = ring(4, 5, first_tokens=800)
    stock = VirtualServer(load, pool_tokens=3_600, policy=Policy()).run()
    policy = SamPolicy("ours_no_hints")
    ours = VirtualServer(load, pool_tokens=3_600, policy=policy).run()
    assert ours.served == stock.served
    assert (ours.kept_peak, ours.use_peak) == (stock.kept_peak, stock.use_peak)
    assert policy.side.host is not None
    assert policy.side.host.manager.stats().sessions == 0


@pytest.mark.parametrize("config", [{}, TIER])
def test_with_hints_nothing_is_left_behind(config: dict[str, object]) -> None:
    load = ring(4, 5, first_tokens=800)
    policy = SamPolicy("hints", RULES, config)
    replay = VirtualServer(load, pool_tokens=3_600, policy=policy).run()
    host, tier = policy.side.host, policy.side.tier
    assert host is not None
    host.manager.check_integrity()
    host.pool.free_queue.check_integrity()
    if tier is not None:
        tier.check_integrity()
        assert tier.stats()["gpu_pinned_blocks"] == 0
    stats = host.manager.stats()
    assert stats.hinted_requests == 20
    assert stats.running_requests == 0
    assert replay.counts["leases_broken"] == stats.leases_broken
    assert replay.kept_peak <= 1.0


def test_hints_beat_lru_where_the_pool_holds_all_but_one() -> None:
    load = ring(4, 5, first_tokens=800)
    stock = VirtualServer(load, pool_tokens=3_600, policy=Policy()).run()
    policy = SamPolicy("hints", RULES)
    hints = VirtualServer(load, pool_tokens=3_600, policy=policy).run()
    assert sum(s.cached_tokens for s in hints.served) > sum(
        s.cached_tokens for s in stock.served
    )


def test_a_prefetch_is_used_by_the_request_it_was_for() -> None:
    load = workload(
        row("a", 0, 1, 2_000),
        row("a/1", 2, 3, 3_000, parent="a"),
        row("a", 30, 31, 2_100),
        row("a", 41, 42, 2_200),
    )
    policy = SamPolicy("tier", HintRules(offload_waiting=True), TIER)
    replay = VirtualServer(load, pool_tokens=8_000, policy=policy).run()
    resumed = replay.served[2]
    assert (resumed.cached_tokens, resumed.loaded_tokens) == (2_000, 0)
    assert resumed.recomputed_tokens == 0
    assert replay.bytes_prefetched > 0
    assert replay.bytes_wasted == 0
    assert replay.counts["prefetch/accepted"] == 1


def test_a_prefetch_that_nobody_wanted_is_wasted() -> None:
    load = workload(
        row("a", 0, 1, 2_000),
        row("a/1", 2, 3, 3_000, parent="a"),
        row("a", 30, 31, 50),
        row("a", 41, 42, 2_200, parent=None),
    )
    rules = HintRules(offload_waiting=True)
    policy = SamPolicy("tier", rules, TIER)
    server = VirtualServer(load, pool_tokens=8_000, policy=policy)
    replay = server.run()
    assert replay.bytes_prefetched >= replay.bytes_wasted >= 0
