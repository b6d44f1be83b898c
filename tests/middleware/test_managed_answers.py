"""Answers without a model run, against vLLM's own response models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sam_connector.middleware.endpoints import Dialect
from sam_connector.middleware.managed_answers import managed_response

DIALECTS = [
    Dialect.CHAT,
    Dialect.COMPLETIONS,
    Dialect.RESPONSES,
    Dialect.MESSAGES,
]
HINT = {"session_id": "s", "results": [{"type": "evict", "status": "completed"}]}
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)


def answer(dialect: Dialect, *, stream: bool = False) -> tuple[str, bytes]:
    response = managed_response(dialect, model="m", hint=HINT, stream=stream)
    assert response.status_code == 200
    return response.headers["content-type"], bytes(response.body)


def events(dialect: Dialect) -> list[tuple[str | None, Any]]:
    kind, body = answer(dialect, stream=True)
    assert kind.startswith("text/event-stream")
    parsed = []
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        *names, data = block.split("\n")
        name = names[0].removeprefix("event: ") if names else None
        text = data.removeprefix("data: ")
        parsed.append((name, text if text == "[DONE]" else json.loads(text)))
    return parsed


@each_dialect
def test_the_results_stand_in_kv_transfer_params(dialect: Dialect) -> None:
    kind, body = answer(dialect)
    wire = json.loads(body)
    assert kind == "application/json"
    assert wire["kv_transfer_params"] == {"agent_hint": HINT}
    assert wire["model"] == "m"


@each_dialect
def test_ids_are_new_each_time(dialect: Dialect) -> None:
    assert json.loads(answer(dialect)[1])["id"] != json.loads(answer(dialect)[1])["id"]


def model_of(dialect: Dialect) -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

    return {
        Dialect.CHAT: ChatCompletionResponse,
        Dialect.COMPLETIONS: CompletionResponse,
        Dialect.RESPONSES: ResponsesResponse,
        Dialect.MESSAGES: AnthropicMessagesResponse,
    }[dialect]


@pytest.mark.vllm
@each_dialect
def test_the_shape_is_vllm_s(dialect: Dialect) -> None:
    parsed = model_of(dialect).model_validate_json(answer(dialect)[1])
    assert parsed.kv_transfer_params == {"agent_hint": HINT}
    assert parsed.usage.model_dump(include={"total_tokens", "output_tokens"}) in (
        {"total_tokens": 0},
        {"output_tokens": 0},
        {"total_tokens": 0, "output_tokens": 0},
    )


def client_model_of(dialect: Dialect) -> Any:
    from anthropic.types import Message
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    return {
        Dialect.CHAT: ChatCompletion,
        Dialect.COMPLETIONS: Completion,
        Dialect.RESPONSES: Response,
        Dialect.MESSAGES: Message,
    }[dialect]


@pytest.mark.vllm
@each_dialect
def test_the_shape_is_the_client_library_s(dialect: Dialect) -> None:
    parsed = client_model_of(dialect).model_validate_json(answer(dialect)[1])
    text = {
        Dialect.CHAT: lambda: parsed.choices[0].message.content,
        Dialect.COMPLETIONS: lambda: parsed.choices[0].text,
        Dialect.RESPONSES: lambda: parsed.output_text,
        Dialect.MESSAGES: lambda: parsed.content[0].text,
    }[dialect]()
    assert text == ""


@pytest.mark.vllm
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS])
def test_an_openai_stream_is_one_chunk_and_done(dialect: Dialect) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletionChunk

    (_, chunk), (_, done) = events(dialect)
    assert done == "[DONE]"
    assert chunk["kv_transfer_params"] == {"agent_hint": HINT}
    model = ChatCompletionChunk if dialect is Dialect.CHAT else Completion
    assert model.model_validate(chunk).choices[0].finish_reason == "stop"


@pytest.mark.vllm
def test_a_responses_stream_is_created_and_completed() -> None:
    from openai.types.responses import ResponseCompletedEvent, ResponseCreatedEvent

    (first, created), (second, completed) = events(Dialect.RESPONSES)
    assert (first, second) == ("response.created", "response.completed")
    assert ResponseCreatedEvent.model_validate(created).response.output == []
    assert ResponseCompletedEvent.model_validate(completed).response.output_text == ""
    assert completed["response"]["kv_transfer_params"] == {"agent_hint": HINT}


@pytest.mark.vllm
def test_a_messages_stream_has_every_event_a_client_waits_for() -> None:
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    parsed = events(Dialect.MESSAGES)
    for name, event in parsed:
        assert adapter.validate_python(event).type == name
    assert [name for name, _ in parsed] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    started = parsed[0][1]["message"]
    assert started["kv_transfer_params"] == {"agent_hint": HINT}
