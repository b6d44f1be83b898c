"""Start-up and the small print of the connector interface."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from benchmarks.engine_config import KVShape
from sam_connector.errors import ConfigurationError
from tests.connector.driving import STREAMS, Driver, TieredDriver, hint

pytestmark = pytest.mark.vllm


def test_wrong_settings_stop_the_start_with_all_errors_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Driver(
            extra_config={
                "host_bites": 1,
                "sam": "maybe",
                "max_sessions": 0,
                "max_protected_fraction": 1.5,
            }
        )
    problems = raised.value.problems
    assert len(problems) == 4
    assert any("host_bites" in problem for problem in problems)


def test_both_spellings_load_the_same_class() -> None:
    by_path = Driver(("SAMConnector", "sam_connector.connector")).scheduler.connector
    by_package = Driver("sam").scheduler.connector
    assert type(by_path) is type(by_package)


def test_a_best_effort_cache_delivers_nothing() -> None:
    connector: Any = Driver().scheduler.connector
    assert connector.requires_kv_delivery is False
    assert connector.has_pending_push_work() is False


def test_s07_more_keywords_of_a_later_vllm_are_accepted() -> None:
    connector: Any = Driver().scheduler.connector
    cls = type(connector)
    again = cls(
        connector._vllm_config, connector.role, connector._kv_cache_config, novelty=1
    )
    assert again.scheduler_side is None


def test_results_of_edits_come_back_with_the_response() -> None:
    driver = Driver()
    outputs: list[Any] = []
    driver.add(
        "r",
        STREAMS[0][:64],
        agent_hint=hint("s", context_management={"edits": [{"type": "offload"}]}),
    )
    while not driver.engine.is_idle:
        for reply in driver.engine.step().values():
            outputs += reply.outputs
    (params,) = [o.kv_transfer_params for o in outputs if o.kv_transfer_params]
    (result,) = params["agent_hint"]["results"]
    assert result["status"] == "unsupported"
    json.dumps(params)
    driver.check_no_leak()


def test_a_broken_hint_is_counted_and_the_request_unharmed() -> None:
    driver = Driver()
    wrong: Any = {"session_id": "s", "cache_control": {"ttl": -1}}
    assert len(driver.run("r", STREAMS[0][:64], max_tokens=3, agent_hint=wrong)) == 3
    stats = driver.call("get_stats")["result"]
    assert (stats["invalid_hints"], stats["sessions"]) == (1, 0)


def test_shutdown_is_idempotent_and_safe_before_binding() -> None:
    connector: Any = Driver().scheduler.connector
    unbound = type(connector)(
        connector._vllm_config, connector.role, connector._kv_cache_config
    )
    for candidate in (unbound, connector):
        candidate.shutdown()
        candidate.shutdown()


def test_p09_two_requests_of_one_session_at_once_are_both_kept() -> None:
    driver = Driver()
    driver.add("a", STREAMS[0][:160], max_tokens=9, agent_hint=hint("s", ttl=60))
    driver.add("b", STREAMS[1][:160], max_tokens=9, agent_hint=hint("s", ttl=60))
    driver.engine.run_until_idle()
    description = driver.call("get_session", tenant="", session_id="s")["result"]
    assert [c["num_blocks"] for c in description["contexts"]] == [10, 10]
    driver.check_no_leak()


def test_a_session_shows_when_it_is_expected_back() -> None:
    driver = Driver()
    said = hint("s", ttl=60) | {"expected_resume_s": 40}
    driver.run("r", STREAMS[0][:160], agent_hint=said)
    description = driver.call("get_session", tenant="", session_id="s")["result"]
    (context,) = description["contexts"]
    assert 0 < context["expected_resume_s"] <= 40
    assert description["expected_resume_s"] == context["expected_resume_s"]
    reply = driver.call(
        "set_lease", tenant="", session_id="s", ttl=0, expected_resume_s=90
    )
    assert reply["result"]["expected_resume_s"] == 90
    description = driver.call("get_session", tenant="", session_id="s")["result"]
    assert description["lease_s"] is None
    assert 80 < description["expected_resume_s"] <= 90
    driver.run("again", STREAMS[0][:161], agent_hint=hint("s", ttl=60))
    description = driver.call("get_session", tenant="", session_id="s")["result"]
    assert description["expected_resume_s"] is None
    assert description["contexts"][0]["expected_resume_s"] is None
    driver.check_no_leak()


@pytest.mark.parametrize("request_id", ["", "0123456789abcdef", "x" * 4096, "ä/ b%"])
def test_p12_request_ids_are_opaque(request_id: str) -> None:
    driver = Driver()
    driver.run(request_id, STREAMS[0][:64], agent_hint=hint("s", ttl=60))
    driver.check_no_leak()


# --- with a host tier -------------------------------------------------------


def again(driver: Driver, *, policy: str) -> Any:
    """Another connector of the same kind, with this policy for failed loads."""
    connector: Any = driver.scheduler.connector
    config = copy.copy(connector._vllm_config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_load_failure_policy = policy
    return type(connector)(config, connector.role, connector._kv_cache_config)


def test_a_load_that_fails_must_not_fail_a_request() -> None:
    """vLLM's default would; without a host tier nothing is ever loaded."""
    driver = Driver(extra_config={"host_bytes": 1 << 20})
    with pytest.raises(ConfigurationError, match="kv_load_failure_policy") as raised:
        again(driver, policy="fail")
    assert "'fail'" in str(raised.value)
    again(driver, policy="recompute")
    again(Driver(), policy="fail")
    again(Driver(extra_config={"host_bytes": "0 GiB"}), policy="fail")


def test_all_that_is_wrong_with_the_settings_is_said_at_once() -> None:
    driver = Driver()
    extra_config = {"host_bytes": "8 apples"}
    config = driver.scheduler.connector._vllm_config.kv_transfer_config
    config.kv_connector_extra_config = extra_config
    with pytest.raises(ConfigurationError, match="apples") as raised:
        again(driver, policy="fail")
    assert "kv_load_failure_policy" in str(raised.value)


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_shake_hands_only_where_they_may_differ(stages: int) -> None:
    """Behind a MultiConnector only one connector is heard: better not ours."""
    with TieredDriver(pipeline_parallel_size=stages) as driver:
        met = [w.connector.get_handshake_metadata() for w in driver.ranks.workers]
        expected = [None] if stages == 1 else [2048 // 2] * 2
        assert [m and m.num_slots for m in met] == expected


def test_without_a_host_tier_a_rank_does_nothing() -> None:
    with TieredDriver(host_bytes=None) as driver:
        (worker,) = driver.ranks.workers
        assert worker.worker_side is None
        assert worker.connector.get_handshake_metadata() is None
        assert worker.connector.build_connector_worker_meta() is None
        driver.run("r", STREAMS[0][:64], agent_hint=hint("s", ttl=60))
        assert driver.tier is None
        assert not driver.side.has_pinned_blocks
        driver.check_no_leak()


def test_a_rank_that_registers_anew_lets_go_of_its_first_memory() -> None:
    with TieredDriver() as driver:
        (worker,) = driver.ranks.workers
        first = worker.worker_side
        worker.connector.register_kv_caches(worker.model.kv_caches)
        assert worker.worker_side is not first
        with pytest.raises(ValueError, match="closed"):
            _ = first.pool.tensor


def test_a_rank_without_layers_copies_nothing() -> None:
    with TieredDriver() as driver:
        connector: Any = driver.scheduler.connector
        worker = type(connector)(
            connector._vllm_config, connector.role, connector._kv_cache_config
        )
        worker.register_kv_caches({})
        assert worker.worker_side is None


def test_a_model_that_the_tier_cannot_hold_is_served_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TieredDriver(shape=KVShape(sliding_window=32)) as driver:
        assert driver.tier is None
        assert all(worker.worker_side is None for worker in driver.ranks.workers)
        driver.run("r", STREAMS[0][:200], agent_hint=hint("s", ttl=60))
        (result,) = driver.edit("s", {"type": "offload"})
        assert result["status"] == "unsupported"
        driver.check_no_leak()
    said = [r for r in caplog.records if "without the host tier" in r.getMessage()]
    assert len(said) == 1
