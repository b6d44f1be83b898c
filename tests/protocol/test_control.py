"""Commands and replies between the processes: plain text, both ways."""

from __future__ import annotations

import json

import pytest

from sam_connector.core.types import Edit, EditType
from sam_connector.errors import HintError
from sam_connector.protocol.control import (
    ApplyEdits,
    Command,
    FailureCode,
    FreeSession,
    GetOperation,
    GetSession,
    GetStats,
    ListSessions,
    Reset,
    SetLease,
    decode_command,
    decode_reply,
    failure,
    success,
)

COMMANDS: list[Command] = [
    ApplyEdits(
        tenant="t",
        session_id="größe/🙂",
        edits=(
            Edit(type=EditType.EVICT),
            Edit(type=EditType.OFFLOAD, block_start=1, block_end=2),
        ),
        wait_s=60,
    ),
    GetSession(tenant="", session_id="s"),
    ListSessions(tenant="t", limit=7, cursor="s"),
    ListSessions(tenant="t"),
    SetLease(tenant="t", session_id="s", ttl=0.5),
    SetLease(tenant="t", session_id="s", ttl=0, expected_resume_s=9.5),
    FreeSession(tenant="t", session_id="s", tree=True),
    GetOperation(tenant="t", operation_id="op-1"),
    GetStats(),
    Reset(),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.op)
def test_commands_round_trip(command: Command) -> None:
    assert decode_command(command.encode()) == command


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"op": "purge"}',
        '{"op": "get_session", "tenant": "t"}',
        '{"op": "get_session", "tenant": "t", "session_id": "s", "more": 1}',
        '{"op": "set_lease", "tenant": "t", "session_id": "s", "ttl": 3601}',
        '{"op": "set_lease", "tenant": "t", "session_id": "s", "ttl": "1"}',
        '{"op": "set_lease", "tenant": "t", "session_id": "s", "ttl": 1,'
        ' "expected_resume_s": -1}',
        '{"op": "list_sessions", "tenant": "t", "limit": 0}',
    ],
)
def test_an_unknown_command_is_a_hint_error(text: str) -> None:
    with pytest.raises(HintError, match="not understood"):
        decode_command(text)


@pytest.mark.parametrize(
    "reply",
    [
        success({"sessions": [{"lease_s": None}]}),
        success(None, found=False),
        success({"results": []}, found=False),
        failure("rejected", "the engine sleeps"),
        failure(FailureCode.UNAVAILABLE, ""),
    ],
)
def test_replies_round_trip(reply: object) -> None:
    assert decode_reply(reply.encode()) == reply  # type: ignore[attr-defined]


def test_reply_wire_forms() -> None:
    assert json.loads(success({"a": 1}).encode()) == {
        "ok": True,
        "found": True,
        "result": {"a": 1},
    }
    assert json.loads(failure("rejected", "why").encode()) == {
        "ok": False,
        "code": "rejected",
        "reason": "why",
    }


@pytest.mark.parametrize(
    "answer",
    [None, b"{}", "", "[]", "7", "{}", '{"ok": true}', '{"ok": false, "code": "x"}'],
)
def test_what_is_no_reply_is_a_value_error(answer: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_reply(answer)
