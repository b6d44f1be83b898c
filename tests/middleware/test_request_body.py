"""Reading ahead and handing on."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from sam_connector.middleware.request_body import mentions_hint, read_body, watched
from tests.middleware.driver import DISCONNECT, body_messages


def receive_from(messages: list[Message]) -> Receive:
    pending = iter(messages)

    async def receive() -> Message:
        return next(pending)

    return receive


def read(messages: list[Message], limit: int = 100) -> tuple[object, list[Message]]:
    """Reads ahead, then everything that an application would receive."""

    async def run() -> tuple[object, list[Message]]:
        receive = receive_from([*messages, DISCONNECT])
        received = await read_body(receive, limit)
        replay = received.replay(receive)
        handed_on = []
        while not handed_on or handed_on[-1] != DISCONNECT:
            handed_on.append(await replay())
        return received, handed_on

    return asyncio.run(run())


def test_chunks_are_handed_on_as_one_then_the_original_speaks() -> None:
    _, handed_on = read(body_messages([b"ab", b"", b"cd"]))
    assert handed_on == [
        {"type": "http.request", "body": b"abcd", "more_body": False},
        DISCONNECT,
    ]


def test_an_empty_body_and_missing_keys() -> None:
    _, handed_on = read([{"type": "http.request"}])
    assert handed_on[0] == {"type": "http.request", "body": b"", "more_body": False}


def test_p01_a_client_that_leaves_while_sending_is_handed_on_as_that() -> None:
    received, handed_on = read(
        [{"type": "http.request", "body": b"ab", "more_body": True}, DISCONNECT]
    )
    assert received.departure == DISCONNECT  # type: ignore[attr-defined]
    assert handed_on == [
        {"type": "http.request", "body": b"ab", "more_body": True},
        DISCONNECT,
    ]


def test_p04_reading_stops_past_the_limit() -> None:
    messages = body_messages([b"x" * 60] * 10)
    received, handed_on = read(messages)
    assert received.is_too_large  # type: ignore[attr-defined]
    assert len(received.body) == 120  # type: ignore[attr-defined]
    total = b"".join(message.get("body", b"") for message in handed_on)
    assert total == b"x" * 600


@pytest.mark.parametrize(
    ("size", "too_large"), [(99, False), (100, False), (101, True)]
)
def test_the_limit_is_exact(size: int, too_large: bool) -> None:
    received, _ = read(body_messages([b"x" * size]))
    assert received.is_too_large is too_large  # type: ignore[attr-defined]


HINT = {"agent_hint": {}}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(HINT).encode(),
        json.dumps({"messages": ["agent_hint"]}).encode(),
        json.dumps(HINT).encode("utf-16"),
        json.dumps(HINT).encode("utf-32-be"),
        rb'{"agent\u005fhint": {}}',
        rb'{"agent\u005Fhint": {}}',
        rb'{"\u0061gent_hint": {}}',
        rb'{"agen\u0074_hint": {}}',
    ],
)
def test_every_spelling_of_the_name_is_noticed(body: bytes) -> None:
    assert "agent_hint" in json.dumps(json.loads(body))
    assert mentions_hint(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"messages": [{"role": "user", "content": "agent hint"}]}',
        json.dumps({"content": "größe 会话 <b>&amp;\n"}).encode(),
        json.dumps({"content": "größe 会话"}, ensure_ascii=False).encode(),
    ],
)
def test_ordinary_bodies_are_not_looked_into(body: bytes) -> None:
    assert not mentions_hint(body)


@pytest.mark.parametrize("split", range(1, 10))
def test_p04_a_hint_late_in_a_large_body_ends_the_request(split: int) -> None:
    name = b"agent_hint"
    head, first, second = b"x" * 50, b"y" * 7 + name[:split], name[split:] + b"z"

    async def run() -> None:
        receive = watched(receive_from(body_messages([first, second])), head, 10)
        await receive()
        await receive()

    with pytest.raises(HTTPException, match="at most 10 bytes") as caught:
        asyncio.run(run())
    assert caught.value.status_code == 413


def test_a_large_body_without_hint_goes_on_as_it_comes() -> None:
    messages = [*body_messages([b"a" * 50, b"b" * 50]), DISCONNECT]

    async def run() -> list[Message]:
        receive = watched(receive_from(messages), b"head", 10)
        return [await receive() for _ in messages]

    assert asyncio.run(run()) == messages
