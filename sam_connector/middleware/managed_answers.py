"""Answers to management requests, in the response shape of their endpoint.

No model ran, so each is that endpoint's empty answer: no text, no tokens, stopped.
The results stand in ``kv_transfer_params.agent_hint``. With ``stream: true`` the same
answer comes as the shortest stream that the endpoint's clients accept.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from sam_connector.middleware.endpoints import Dialect

_OPENAI_USAGE = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}
_ANTHROPIC_USAGE = {"input_tokens": 0, "output_tokens": 0}


def managed_response(
    dialect: Dialect, *, model: str, hint: dict[str, Any], stream: bool
) -> Response:
    """The answer.

    Args:
        dialect: whose shape it takes.
        model: the model's name, which every shape wants.
        hint: goes into ``kv_transfer_params.agent_hint``.
        stream: whether the client asked for events.
    """
    answer = _ANSWERS[dialect](model) | {"kv_transfer_params": {"agent_hint": hint}}
    if not stream:
        return JSONResponse(answer)
    return Response("".join(_STREAMS[dialect](answer)), media_type="text/event-stream")


def _chat(model: str) -> dict[str, Any]:
    return {
        "id": _new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _OPENAI_USAGE,
    }


def _completion(model: str) -> dict[str, Any]:
    return {
        "id": _new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": _OPENAI_USAGE,
    }


def _response(model: str) -> dict[str, Any]:
    return {
        "id": _new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": model,
        "output": [
            {
                "id": _new_id("msg_"),
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "", "annotations": []}],
            }
        ],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": None,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": 0,
        "service_tier": "auto",
        "truncation": "disabled",
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
    }


def _message(model: str) -> dict[str, Any]:
    return {
        "id": _new_id("msg_"),
        "type": "message",
        "role": "assistant",
        # Not an empty list: strict clients read the first block.
        "content": [{"type": "text", "text": ""}],
        "model": model,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": _ANTHROPIC_USAGE,
    }


def _stream_chat(answer: dict[str, Any]) -> Iterator[str]:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop"}
    yield _event(
        answer | {"object": "chat.completion.chunk", "choices": [choice]},
    )
    yield "data: [DONE]\n\n"


def _stream_completion(answer: dict[str, Any]) -> Iterator[str]:
    yield _event(answer)
    yield "data: [DONE]\n\n"


def _stream_response(answer: dict[str, Any]) -> Iterator[str]:
    begun = answer | {"status": "in_progress", "output": [], "usage": None}
    for number, (name, state) in enumerate(
        [("response.created", begun), ("response.completed", answer)]
    ):
        event = {"type": name, "sequence_number": number, "response": state}
        yield _event(event, name)


def _stream_message(answer: dict[str, Any]) -> Iterator[str]:
    begun = answer | {"content": [], "stop_reason": None}
    block = answer["content"][0]
    stop = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    for name, event in {
        "message_start": {"message": begun},
        "content_block_start": {"index": 0, "content_block": block},
        "content_block_stop": {"index": 0},
        "message_delta": {"delta": stop, "usage": answer["usage"]},
        "message_stop": {},
    }.items():
        yield _event({"type": name} | event, name)


def _event(data: dict[str, Any], name: str | None = None) -> str:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


_ANSWERS = {
    Dialect.CHAT: _chat,
    Dialect.COMPLETIONS: _completion,
    Dialect.RESPONSES: _response,
    Dialect.MESSAGES: _message,
}
_STREAMS = {
    Dialect.CHAT: _stream_chat,
    Dialect.COMPLETIONS: _stream_completion,
    Dialect.RESPONSES: _stream_response,
    Dialect.MESSAGES: _stream_message,
}
