"""The call into the engine: bounded, merged, and never an exception."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sam_connector.core.types import Edit, EditType
from sam_connector.middleware.engine_control import EngineControl
from sam_connector.protocol.control import (
    ApplyEdits,
    Command,
    FailureCode,
    GetSession,
    Reply,
    failure,
    success,
)
from tests.middleware.driver import FakeEngineCore

GET = GetSession(tenant="t", session_id="s")


def ask(core: Any, command: Command = GET, margin_s: float = 5) -> Reply:
    return asyncio.run(EngineControl(lambda: core, margin_s=margin_s).call(command))


def test_the_command_goes_as_text_and_the_reply_comes_back() -> None:
    core = FakeEngineCore(lambda command: success({"session_id": "s"}))
    assert ask(core) == success({"session_id": "s"})
    assert core.commands == [GET]


def test_a_failure_reply_is_passed_on() -> None:
    core = FakeEngineCore(lambda command: failure("rejected", "asleep"))
    assert ask(core) == failure("rejected", "asleep")


class SeveralEngines:
    """A client of engines that load-balances: the single call drops answers."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = replies

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        raise AssertionError("would reach one engine only")

    async def call_utility_all_async(self, method: str, *args: Any) -> list[str]:
        return [reply.encode() for reply in self.replies]


def test_all_engines_are_asked_and_the_one_that_knows_answers() -> None:
    core = SeveralEngines(success(None, found=False), success({"session_id": "s"}))
    assert ask(core) == success({"session_id": "s"})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Exception("Call to sam_control method failed: no attribute"), "SAMConnector"),
        (Exception("Call to sam_control method failed: no SAMConnector"), "started"),
        (RuntimeError("/usr/lib/secret.py line 3"), "could not be asked"),
        (ValueError("bad"), "could not be asked"),
    ],
)
def test_an_error_of_the_engine_is_unavailable(error: Exception, words: str) -> None:
    reply = ask(FakeEngineCore(lambda command: error))
    assert reply.code is FailureCode.UNAVAILABLE
    assert words in reply.reason
    assert "secret" not in reply.reason


@pytest.mark.parametrize("answer", ["", "nonsense", '{"ok": true}'])
def test_an_answer_that_is_no_reply_is_unavailable(answer: str) -> None:
    reply = ask(FakeEngineCore(lambda command: answer))
    assert reply.code is FailureCode.UNAVAILABLE


@pytest.mark.parametrize("core", [None, object()])
def test_a_server_without_an_engine_client_is_unavailable(core: object) -> None:
    assert ask(core).code is FailureCode.UNAVAILABLE


class SilentEngine:
    def __init__(self) -> None:
        self.cancelled = False

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_an_engine_that_never_answers_is_given_up() -> None:
    core = SilentEngine()
    reply = ask(core, margin_s=0.01)
    assert reply.code is FailureCode.UNAVAILABLE
    assert "in time" in reply.reason
    assert core.cancelled


def test_the_wait_a_command_asks_for_is_granted() -> None:
    class Slow(FakeEngineCore):
        async def call_utility_async(self, method: str, *args: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().call_utility_async(method, *args)

    command = ApplyEdits(
        tenant="", session_id="s", edits=(Edit(type=EditType.EVICT),), wait_s=10
    )
    assert ask(Slow(), command, margin_s=0).ok


def test_leaving_cancels_the_call() -> None:
    core = SilentEngine()

    async def run() -> None:
        task = asyncio.create_task(EngineControl(lambda: core).call(GET))  # type: ignore[arg-type,return-value]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert core.cancelled
