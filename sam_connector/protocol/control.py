"""The control call from an API server process to an engine process.

One JSON text goes in and one comes out, because vLLM passes strings between its
processes whatever else changes, and because an object that its encoder does not
know ends the engine's output thread.

``result`` of a successful reply, by command:

=================  =========================================================
``ApplyEdits``     ``session_id, results``: one result for each edit (see
                   ``results.py``); a session the engine does not know answers
                   ``found: false`` with ``not_found`` results
``GetSession``     ``session_id, parent, children, contexts, blocks, lease_s,
                   expected_resume_s, running_requests, operations``;
                   ``contexts`` holds ``num_blocks, resident_blocks,
                   num_tokens, lease_s, expected_resume_s``, ``blocks`` counts
                   by tier (``gpu, host, store``)
``ListSessions``   ``sessions`` in the order of their ids, at most ``limit``
                   after the given ``cursor``; ``cursor``: the last id, if more
                   follow
``SetLease``       ``session_id, ttl, status`` (``completed, partial, rejected``),
                   ``expected_resume_s`` if it was given, and a ``reason`` unless
                   completed
``FreeSession``    ``freed``: how many sessions
``GetOperation``   ``session_id`` and the parts of a result
``GetStats``       counters and gauges, nested or not
``Reset``          ``reset``
=================  =========================================================
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sam_connector.core.types import Edit
from sam_connector.errors import HintError
from sam_connector.protocol.agent_hint import MAX_EDITS, Seconds, SessionId

MAX_WAIT_S = 60.0
MAX_LIST_LIMIT = 1000
DEFAULT_LIST_LIMIT = 100


class _Command(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    def encode(self) -> str:
        return self.model_dump_json()


class ApplyEdits(_Command):
    """Applies edits; the answer may be deferred until they end or ``wait_s`` passes."""

    op: Literal["apply_edits"] = "apply_edits"
    tenant: str
    session_id: SessionId
    edits: tuple[Edit, ...] = Field(max_length=MAX_EDITS)
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)


class GetSession(_Command):
    op: Literal["get_session"] = "get_session"
    tenant: str
    session_id: SessionId


class ListSessions(_Command):
    op: Literal["list_sessions"] = "list_sessions"
    tenant: str
    limit: int = Field(default=DEFAULT_LIST_LIMIT, ge=1, le=MAX_LIST_LIMIT)
    cursor: str | None = None


class SetLease(_Command):
    """Retention from now, without a request; 0 ends it.

    Without ``expected_resume_s`` what is known of that stays.
    """

    op: Literal["set_lease"] = "set_lease"
    tenant: str
    session_id: SessionId
    ttl: Seconds
    expected_resume_s: Seconds | None = None


class FreeSession(_Command):
    """Forgets a session, with ``tree`` its children before it."""

    op: Literal["free_session"] = "free_session"
    tenant: str
    session_id: SessionId
    tree: bool = False


class GetOperation(_Command):
    op: Literal["get_operation"] = "get_operation"
    tenant: str
    operation_id: str


class GetStats(_Command):
    op: Literal["get_stats"] = "get_stats"


class Reset(_Command):
    """Drops what is known of cached content, for all tenants.

    With ``keep_store`` only what is in this engine's memory: what the store has is
    still right, and may be read again.
    """

    op: Literal["reset"] = "reset"
    keep_store: bool = False


Command = (
    ApplyEdits
    | GetSession
    | ListSessions
    | SetLease
    | FreeSession
    | GetOperation
    | GetStats
    | Reset
)

_COMMAND: TypeAdapter[Command] = TypeAdapter(
    Annotated[Command, Field(discriminator="op")]
)


def decode_command(text: str) -> Command:
    """The command that ``encode`` wrote.

    Raises:
        HintError: the text is no command of this version.
    """
    try:
        return _COMMAND.validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in details["loc"])
        raise HintError(path or "op", "not understood by this engine") from None


class FailureCode(enum.StrEnum):
    """Why a command was not carried out."""

    REJECTED = "rejected"  # not now: the engine sleeps, a queue is full
    UNAVAILABLE = "unavailable"  # this engine cannot: no connector, not reachable
    INVALID = "invalid"  # the command itself is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An engine's answer.

    Attributes:
        found: whether what the command names is known here; ``True`` for commands
            that name nothing.
        code: ``None`` if the command was carried out.
        reason: for a person, if it was not.
    """

    found: bool = True
    result: dict[str, Any] = field(default_factory=dict)
    code: FailureCode | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.code is None

    def encode(self) -> str:
        wire: dict[str, Any]
        if self.code is not None:
            wire = {"ok": False, "code": self.code.value, "reason": self.reason}
        else:
            wire = {"ok": True, "found": self.found, "result": self.result}
        return json.dumps(wire)


def success(result: dict[str, Any] | None, *, found: bool = True) -> Reply:
    """The command was carried out, or what it names is not known."""
    return Reply(found=found, result=result or {})


def failure(code: FailureCode | str, reason: str) -> Reply:
    """The command was not carried out."""
    return Reply(found=False, code=FailureCode(code), reason=reason)


def decode_reply(text: object) -> Reply:
    """The reply that ``encode`` wrote.

    Raises:
        ValueError: the text is no reply of this version.
    """
    if not isinstance(text, str):
        raise ValueError("a reply is a JSON text")
    wire = json.loads(text)
    try:
        if not wire["ok"]:
            return failure(wire["code"], str(wire["reason"]))
        return success(dict(wire["result"]), found=bool(wire["found"]))
    except (KeyError, TypeError) as error:
        raise ValueError("a part of the reply is missing") from error
