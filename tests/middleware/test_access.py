"""What the layer and the routes share."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sam_connector.core.types import Edit, EditType
from sam_connector.middleware.access import Access, failure_of
from sam_connector.middleware.errors import ApiError
from sam_connector.protocol.control import ApplyEdits, failure, success
from tests.middleware.driver import make_server

COMMAND = ApplyEdits(tenant="t", session_id="s", edits=(Edit(type=EditType.EVICT),) * 2)


def applied(answer: Any, command: ApplyEdits = COMMAND) -> dict[str, Any] | ApiError:
    server = make_server()
    server.engine.answer = lambda command: answer
    return asyncio.run(Access(server.app).apply_edits(command))


@pytest.mark.parametrize("found", [True, False])
def test_results_are_passed_on(found: bool) -> None:
    answer = {"session_id": "s", "results": []}
    assert applied(success(answer, found=found)) == answer


def test_a_rejection_is_one_result_for_each_edit() -> None:
    outcome = applied(failure("rejected", "asleep"))
    assert isinstance(outcome, dict)
    reasons = [(one["status"], one["reason"]) for one in outcome["results"]]
    assert reasons == [("rejected", "asleep")] * 2


def test_a_failure_is_an_error() -> None:
    outcome = applied(failure("unavailable", "no connector"))
    assert outcome == failure_of(failure("unavailable", "no connector"))
    assert isinstance(outcome, ApiError)
    assert outcome.status == 503


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (SimpleNamespace(served_model_name=["a", "b"], model="m"), "a"),
        (SimpleNamespace(served_model_name=None, model="m"), "m"),
        (SimpleNamespace(), ""),
        (None, ""),
    ],
)
def test_the_model_s_name(args: object, expected: str) -> None:
    server = make_server()
    server.app.state.args = args
    assert Access(server.app).model_name == expected
