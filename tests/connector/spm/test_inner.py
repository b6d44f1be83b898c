"""Look-ups of ours are like requests that were aborted before they ran."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.connector.driving import STREAMS, hint
from tests.connector.spm.driving import SpmDriver
from tests.connector.spm.inner_connectors import RAISING

pytestmark = pytest.mark.vllm


@pytest.fixture
def driver() -> Any:
    with SpmDriver() as driver:
        driver.run("r", STREAMS[0][:161], agent_hint=hint("s"))
        driver.step(20)
        yield driver


def sequence_of(driver: SpmDriver) -> Any:
    (session,) = driver.spm.book.sessions()
    return driver.spm.book.of(session)[-1]


def test_what_is_saved_is_found(driver: SpmDriver) -> None:
    inner = driver.connector._inner_scheduler
    assert inner.num_found(sequence_of(driver), 10) == 10
    assert inner.num_found(sequence_of(driver), 4) == 4


def test_a_look_up_ends_as_an_aborted_request(
    driver: SpmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, heard = driver.connector._inner_scheduler, []
    monkeypatch.setattr(
        driver.inner, "on_new_request", lambda r: heard.append(("new", r.request_id))
    )
    monkeypatch.setattr(
        driver.inner,
        "request_finished_all_groups",
        lambda r, ids: heard.append((r.status, r.request_id, ids)) or (False, None),
    )
    inner.num_found(sequence_of(driver), 10)
    (_, name), (status, same, ids) = heard
    assert name == same
    assert status == RequestStatus.FINISHED_ABORTED
    assert ids == ([],)
    assert name in inner.ended


def test_no_answer_is_no_answer(driver: SpmDriver) -> None:
    driver.inner.answer = (None, False)
    assert driver.connector._inner_scheduler.num_found(sequence_of(driver), 10) is None
    driver.inner.answer = (-16, False)
    assert driver.connector._inner_scheduler.num_found(sequence_of(driver), 10) == 0
    driver.inner.answer = (100_000, False)
    assert driver.connector._inner_scheduler.num_found(sequence_of(driver), 10) == 10


def test_a_look_up_that_raises_finds_nothing(driver: SpmDriver) -> None:
    RAISING.add("get_num_new_matched_tokens")
    assert driver.connector._inner_scheduler.num_found(sequence_of(driver), 10) == 0
