"""SAM drives any connector that declares the capability, not our class.

``RecordingTier`` below is a third party's connector: it sits next to ours in a
``MultiConnector``, inherits the capability, and answers operations later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from sam_connector.core.tiers import (
    ContextBlocks,
    OperationHandle,
    Residency,
    SupportsSessionAwareKVManagement,
    TierEvent,
    TierEventType,
)
from sam_connector.core.types import BlockCounts, EditStatus, EditType, SessionKey
from tests.connector.driving import STREAMS, Driver, hint

pytestmark = pytest.mark.vllm


class RecordingTier(KVConnectorBase_V1, SupportsHMA, SupportsSessionAwareKVManagement):
    """Writes down what it is told and finishes operations when told to."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[TierEvent] = []

    session_capabilities = frozenset(EditType)

    def register_cache(
        self,
        session: SessionKey,
        request_id: str,
        contents: Callable[[], ContextBlocks],
    ) -> None:
        self.calls.append(("register", session.session_id, request_id, contents()))

    def offload(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        self.calls.append(("offload", session.session_id, operation_id, contexts))
        return OperationHandle(status=EditStatus.ACCEPTED)

    def prefetch(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        self.calls.append(("prefetch", session.session_id, operation_id, contexts))
        return OperationHandle(status=EditStatus.REJECTED, reason="queue is full")

    def evict(
        self,
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
        *,
        purge: bool,
    ) -> OperationHandle:
        self.calls.append(("evict", session.session_id, operation_id, contexts))
        return OperationHandle(status=EditStatus.COMPLETED, num_bytes=7)

    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        pass

    def release(self, session: SessionKey, context_id: int) -> None:
        self.calls.append(("release", session.session_id))

    def query_residency(
        self, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> Residency:
        return Residency(tier="recording", num_blocks=3)

    def take_session_events(self) -> Sequence[TierEvent]:
        events, self.events = self.events, []
        return events

    # What vLLM's own interface asks for; nothing of it matters here.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def child(name: str, module_path: str) -> dict[str, str]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module_path,
        "kv_role": "kv_both",
    }


@pytest.fixture(params=["ours first", "ours last"])
def driver(request: pytest.FixtureRequest) -> Driver:
    children = [
        child("SAMConnector", "sam_connector"),
        child("RecordingTier", "tests.connector.test_multi_connector"),
    ]
    if request.param == "ours last":
        children.reverse()
    return Driver(
        (
            "MultiConnector",
            "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
        ),
        extra_config={"connectors": children},
    )


def tier_of(driver: Driver) -> Any:
    connector: Any = driver.scheduler.connector
    (tier,) = (c for c in connector.sub_connectors if hasattr(c, "calls"))
    return tier


def ask_to_offload(
    driver: Driver, *, wait_s: float = 0.0, is_paused: bool = False
) -> str | Future[str]:
    """A control call as the API server sends it; the answer may be deferred."""
    command = {
        "op": "apply_edits",
        "tenant": "",
        "session_id": "s",
        "edits": [{"type": "offload"}],
        "wait_s": wait_s,
    }
    return driver.side.control(json.dumps(command), is_paused=is_paused)


def test_the_tier_hears_what_a_completed_request_has(driver: Driver) -> None:
    request = driver.add("r", STREAMS[0][:160], agent_hint=hint("s"))
    driver.engine.run_until_idle()
    kind, session_id, request_id, context = tier_of(driver).calls[0]
    assert (kind, session_id, request_id) == ("register", "s", "r")
    assert list(context.block_hashes[0]) == request.block_hashes[:10]
    driver.check_no_leak()


def test_offload_releases_local_retention_only_once_confirmed(driver: Driver) -> None:
    driver.run("r", STREAMS[0][:160], agent_hint=hint("s", ttl=300))
    (result,) = driver.edit("s", {"type": "offload"})
    assert result["status"] == "accepted"
    assert driver.manager.stats().protected_blocks == 10
    operation_id = result["operation_id"]
    tier_of(driver).events.append(
        TierEvent(
            type=TierEventType.OPERATION,
            operation_id=operation_id,
            handle=OperationHandle(
                status=EditStatus.COMPLETED,
                blocks=BlockCounts(requested=10, done=10),
                num_bytes=640,
            ),
        )
    )
    driver.run("step", STREAMS[1][:32])
    assert driver.manager.stats().protected_blocks == 0
    reply = driver.call("get_operation", tenant="", operation_id=operation_id)
    assert reply["result"]["status"] == "completed"
    assert reply["result"]["bytes"] == 640
    driver.check_no_leak()


def test_a_failed_offload_keeps_what_is_there(driver: Driver) -> None:
    driver.run("r", STREAMS[0][:160], agent_hint=hint("s", ttl=300))
    (result,) = driver.edit("s", {"type": "offload"})
    tier_of(driver).events.append(
        TierEvent(
            type=TierEventType.OPERATION,
            operation_id=result["operation_id"],
            handle=OperationHandle(status=EditStatus.REJECTED, reason="disk on fire"),
        )
    )
    driver.run("step", STREAMS[1][:32])
    assert driver.manager.stats().protected_blocks == 10
    driver.check_no_leak()


def test_prefetch_and_evict_reach_the_tier(driver: Driver) -> None:
    driver.run("r", STREAMS[0][:160], agent_hint=hint("s", ttl=300))
    prefetch, evict = driver.edit("s", {"type": "prefetch"}, {"type": "evict"})
    assert (prefetch["status"], prefetch["reason"]) == ("rejected", "queue is full")
    assert (evict["status"], evict["bytes"]) == ("completed", 7)
    assert [call[0] for call in tier_of(driver).calls] == [
        "register",
        "prefetch",
        "evict",
        "release",
    ]
    driver.check_no_leak()


def test_a_waiting_client_is_answered_when_the_operation_ends(driver: Driver) -> None:
    driver.run("r", STREAMS[0][:160], agent_hint=hint("s", ttl=300))
    answer = ask_to_offload(driver, wait_s=30)
    assert isinstance(answer, Future)
    # An idle engine keeps stepping for as long as somebody waits, no longer.
    assert driver.scheduler.has_requests()
    tier = tier_of(driver)
    operation_id = tier.calls[-1][2]
    tier.events.append(
        TierEvent(
            type=TierEventType.OPERATION,
            operation_id=operation_id,
            handle=OperationHandle(status=EditStatus.COMPLETED),
        )
    )
    driver.engine.step()
    reply = json.loads(answer.result(timeout=0))
    assert reply["result"]["results"][0]["status"] == "completed"
    driver.engine.run_until_idle()
    driver.check_no_leak()


def test_shutdown_answers_whoever_waits(driver: Driver) -> None:
    driver.run("r", STREAMS[0][:160], agent_hint=hint("s", ttl=300))
    answer = ask_to_offload(driver, wait_s=60)
    assert isinstance(answer, Future)
    driver.scheduler.connector.shutdown()
    driver.scheduler.connector.shutdown()
    reply = json.loads(answer.result(timeout=0))
    assert reply["result"]["results"][0]["status"] == "accepted"


def test_a_paused_engine_moves_nothing(driver: Driver) -> None:
    driver.run("r", STREAMS[0][:160], agent_hint=hint("s", ttl=300))
    answer = ask_to_offload(driver, is_paused=True)
    assert isinstance(answer, str)
    (result,) = json.loads(answer)["result"]["results"]
    assert result["status"] == "rejected"
    assert "paused" in result["reason"]
    assert [call[0] for call in tier_of(driver).calls] == ["register"]
