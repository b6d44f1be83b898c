from __future__ import annotations

import asyncio

import pytest

from benchmarks.demo import client as client_module
from benchmarks.demo.client import ControlError
from benchmarks.demo.policy import ControlCall
from tests.benchmarks.demo.fake_server import FakeServer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RESET_PERIOD_S", 0.0)


def reset(server: FakeServer, *, sessions: bool) -> None:
    async def run() -> None:
        async with server.client() as client:
            await client.reset(sessions=sessions)

    asyncio.run(run())


def test_a_reset_is_repeated_until_nothing_holds_a_block() -> None:
    server = FakeServer()
    server.resets_refused = 2
    reset(server, sessions=False)
    assert server.log == [("reset", "reset_external=true")] * 3


def test_a_server_that_knows_sessions_forgets_their_content_too() -> None:
    server = FakeServer()
    reset(server, sessions=True)
    assert server.log == [("reset sessions",), ("reset", "reset_external=true")]


def test_a_reset_that_never_works_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RESET_TIMEOUT_S", 0.05)
    server = FakeServer()
    server.resets_refused = 10**9
    with pytest.raises(RuntimeError, match="blocks are in use"):
        reset(server, sessions=False)


def test_a_refused_control_call_carries_its_status() -> None:
    server = FakeServer()
    server.refused["/lease"] = 404
    call = ControlCall(method="PUT", path="/v1/agent/sessions/a/lease")

    async def run() -> None:
        async with server.client() as client:
            await client.control(call)

    with pytest.raises(ControlError, match="answered 404") as caught:
        asyncio.run(run())
    assert caught.value.status == 404


def test_a_streamed_answer_is_measured() -> None:
    server = FakeServer()

    async def run() -> None:
        async with server.client() as client:
            await client.stream([9] * 10, 2, None)
            done = await client.stream([9] * 12, 3, {"session_id": "s"})
            assert (done.prompt_tokens, done.cached_tokens) == (12, 10)
            assert done.completion_tokens == 3
            assert 0 <= done.ttft_s <= done.latency_s

    asyncio.run(run())
    assert server.hints == [None, {"session_id": "s"}]
