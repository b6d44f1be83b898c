"""The four inference routes, and what a test says to each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from tests.live.server import MODEL_NAME, LiveServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

#: Fills a few blocks.
TEXT = "The licensor grants the right to use this work. " * 12


def body_of(path: str, text: str = TEXT, *, max_tokens: int = 3) -> dict[str, Any]:
    """A request without any hint."""
    body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
    if path in (CHAT, MESSAGES):
        body["messages"] = [{"role": "user", "content": text}]
    elif path == COMPLETIONS:
        body["prompt"] = text
    else:
        body["input"] = text
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = max_tokens
    return body


def managing(session_id: str, *edit_types: str) -> dict[str, Any]:
    """A hint that asks for edits and no model execution."""
    edits = [{"type": edit_type} for edit_type in edit_types]
    return {
        "session_id": session_id,
        "context_management": {"manage_request": True, "edits": edits},
    }


def session_path(session_id: str) -> str:
    return f"/v1/agent/sessions/{quote(session_id, safe='')}"


def session_of(server: LiveServer, session_id: str) -> dict[str, Any] | None:
    """What the server tells of a session; ``None`` if it knows none."""
    answer = server.get(session_path(session_id))
    if answer.status_code == 404:
        return None
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a whole stream."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    texts = [line.removeprefix("data: ") for line in lines]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def error_of(answer: httpx.Response) -> str:
    """The message of an error, in whichever shape it came."""
    error: Mapping[str, Any] = answer.json()["error"]
    return str(error["message"])
