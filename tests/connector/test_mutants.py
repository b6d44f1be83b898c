"""The adapter's guards against races: each scenario fails once its guard is gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sam_connector.vllm_adapter.block_pool import BlockPoolAdapter
from sam_connector.vllm_adapter.chains import ChainReader
from tests.connector.driving import STREAMS, Driver, hint

pytestmark = pytest.mark.vllm


def abort_with_a_step_in_flight() -> None:
    """What a step in flight is about to write is not yet part of the context."""
    driver = Driver(async_scheduling=True, max_num_batched_tokens=32)
    driver.add("r", STREAMS[0][:128], agent_hint=hint("s", ttl=60))
    driver.engine.step()
    driver.engine.step()
    request = driver.scheduler.requests["r"]
    assert request.num_in_flight_tokens > 0
    certain = (request.num_computed_tokens - request.num_in_flight_tokens) // 16
    driver.scheduler.finish_requests("r", _aborted())
    (context,) = driver.call("get_session", tenant="", session_id="s")["result"][
        "contexts"
    ]
    assert context["num_blocks"] == certain
    driver.check_no_leak()


def reset_that_nobody_is_told_about() -> None:
    """After a reset no session holds a block, whoever asked for the reset."""
    driver = Driver()
    driver.run("r", STREAMS[0][:128], agent_hint=hint("s", ttl=60))
    assert driver.scheduler.reset_prefix_cache()
    assert driver.call("get_stats")["result"]["claimed_blocks"] == 0


def count_in_flight_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(self: ChainReader, request: object, block_ids: object) -> object:
        num_tokens = request.num_computed_tokens  # type: ignore[attr-defined]
        return self._chains(request, block_ids, num_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(ChainReader, "computed", computed)


def never_notice_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPoolAdapter, "take_reset", lambda self: False)


Guard = Callable[[pytest.MonkeyPatch], None]

CASES: list[tuple[Callable[[], None], Guard]] = [
    (abort_with_a_step_in_flight, count_in_flight_as_computed),
    (reset_that_nobody_is_told_about, never_notice_a_reset),
]


@pytest.mark.parametrize("scenario", [c[0] for c in CASES], ids=lambda f: f.__name__)
def test_with_its_guard_the_scenario_holds(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize(("scenario", "remove_guard"), CASES)
def test_without_its_guard_it_does_not(
    scenario: Callable[[], None], remove_guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_guard(monkeypatch)
    with pytest.raises(AssertionError):
        scenario()


def _aborted() -> object:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
