"""The control routes: everything about sessions that needs no request to the model.

======  ====================================  =====================================
method  path                                  does
======  ====================================  =====================================
POST    ``/v1/agent/sessions/{id}/edits``     applies edits; one result for each
GET     ``/v1/agent/sessions/{id}``           what is known of a session
GET     ``/v1/agent/sessions``                the tenant's sessions
PUT     ``/v1/agent/sessions/{id}/lease``     retention from now
DELETE  ``/v1/agent/sessions/{id}``           forgets it (``tree``: and its children)
GET     ``/v1/agent/operations/{id}``         state of an operation
GET     ``/v1/agent/stats``                   counters and gauges of the server
POST    ``/v1/agent/reset``                   drops what is known of cached content
======  ====================================  =====================================

Session ids may contain slashes; a client percent-encodes them, the server decodes
them before routing, and the routes take the longest id that their ending leaves.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sam_connector.errors import HintError
from sam_connector.middleware.access import Access, failure_of
from sam_connector.middleware.errors import ApiError, error_response
from sam_connector.protocol.agent_hint import (
    encodable,
    parse_edits,
    parse_expected_resume,
    parse_session_id,
    parse_ttl,
)
from sam_connector.protocol.control import (
    DEFAULT_LIST_LIMIT,
    MAX_LIST_LIMIT,
    MAX_WAIT_S,
    ApplyEdits,
    Command,
    FreeSession,
    GetOperation,
    GetSession,
    GetStats,
    ListSessions,
    Reset,
    SetLease,
)

PREFIX = "/v1/agent"
#: 16 edits need far less.
MAX_BODY_BYTES = 64 * 1024
MAX_OPERATION_ID_LENGTH = 64

Handler = Callable[[Request], Awaitable[Response]]


def control_routes(access: Access) -> list[Route]:
    """The routes, for one application."""
    routes = ControlRoutes(access)
    session = f"{PREFIX}/sessions/{{session_id:path}}"
    table: list[tuple[str, str, Handler]] = [
        ("GET", f"{PREFIX}/sessions", routes.list_sessions),
        ("POST", f"{session}/edits", routes.apply_edits),
        ("PUT", f"{session}/lease", routes.set_lease),
        ("GET", session, routes.get_session),
        ("DELETE", session, routes.free_session),
        ("GET", f"{PREFIX}/operations/{{operation_id}}", routes.get_operation),
        ("GET", f"{PREFIX}/stats", routes.get_stats),
        ("POST", f"{PREFIX}/reset", routes.reset),
    ]
    return [
        Route(path, _refusing(handler), methods=[method], include_in_schema=False)
        for method, path, handler in table
    ]


class ControlRoutes:
    """One handler for each route; invalid input is a ``HintError``."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def apply_edits(self, request: Request) -> Response:
        body = await _json_body(request, allowed={"edits", "wait_s"})
        if "edits" not in body:
            raise HintError("edits", "is required")
        command = ApplyEdits(
            tenant=self._tenant(request),
            session_id=_session_id(request),
            edits=parse_edits(body["edits"]),
            wait_s=_wait_s(body.get("wait_s", 0)),
        )
        outcome = await self._access.apply_edits(command)
        if isinstance(outcome, ApiError):
            return error_response(outcome)
        return JSONResponse(outcome)

    async def get_session(self, request: Request) -> Response:
        session_id = _session_id(request)
        command = GetSession(tenant=self._tenant(request), session_id=session_id)
        return await self._answer(command, missing="session")

    async def list_sessions(self, request: Request) -> Response:
        command = ListSessions(
            tenant=self._tenant(request),
            limit=_limit(request.query_params.get("limit")),
            cursor=_cursor(request.query_params.get("cursor")),
        )
        return await self._answer(command)

    async def set_lease(self, request: Request) -> Response:
        body = await _json_body(request, allowed={"ttl", "expected_resume_s"})
        if "ttl" not in body:
            raise HintError("ttl", "is required")
        command = SetLease(
            tenant=self._tenant(request),
            session_id=_session_id(request),
            ttl=parse_ttl(body["ttl"]),
            expected_resume_s=parse_expected_resume(body.get("expected_resume_s")),
        )
        return await self._answer(command, missing="session")

    async def free_session(self, request: Request) -> Response:
        command = FreeSession(
            tenant=self._tenant(request),
            session_id=_session_id(request),
            tree=_flag(request.query_params.get("tree"), field="tree"),
        )
        return await self._answer(command, missing="session")

    async def get_operation(self, request: Request) -> Response:
        operation_id = request.path_params["operation_id"]
        if len(operation_id) > MAX_OPERATION_ID_LENGTH:
            raise HintError("operation_id", "is too long")
        command = GetOperation(tenant=self._tenant(request), operation_id=operation_id)
        return await self._answer(command, missing="operation")

    async def get_stats(self, request: Request) -> Response:
        return await self._answer(GetStats())

    async def reset(self, request: Request) -> Response:
        keep_store = _flag(request.query_params.get("keep_store"), field="keep_store")
        return await self._answer(Reset(keep_store=keep_store))

    def _tenant(self, request: Request) -> str:
        return self._access.tenancy.tenant_of(request.headers)

    async def _answer(self, command: Command, missing: str = "") -> Response:
        reply = await self._access.control.call(command)
        if not reply.ok:
            return error_response(failure_of(reply))
        if not reply.found:
            error = ApiError(
                status=HTTPStatus.NOT_FOUND, message=f"the {missing} is not known"
            )
            return error_response(error)
        return JSONResponse(reply.result)


def _refusing(handler: Handler) -> Handler:
    """Turns invalid input into a 400 that names the field."""

    @functools.wraps(handler)
    async def refusing(request: Request) -> Response:
        try:
            return await handler(request)
        except HintError as error:
            return error_response(ApiError.of_hint(error))

    return refusing


async def _json_body(request: Request, *, allowed: set[str]) -> Mapping[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise HintError("body", f"must have at most {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise HintError("body", "must be JSON") from None
    if not isinstance(body, dict):
        raise HintError("body", "must be an object")
    for name in body:
        if name not in allowed:
            raise HintError(encodable(name), "unknown field")
    return body


def _session_id(request: Request) -> str:
    return parse_session_id(request.path_params["session_id"], field="session_id")


def _wait_s(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Written so that NaN fails.
    if not is_number or not 0 <= value <= MAX_WAIT_S:  # type: ignore[operator]
        raise HintError("wait_s", f"must be a number from 0 to {MAX_WAIT_S:g}")
    return float(value)  # type: ignore[arg-type]


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIST_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise HintError("limit", "must be an integer")
    if not 1 <= int(text) <= MAX_LIST_LIMIT:
        raise HintError("limit", f"must be from 1 to {MAX_LIST_LIMIT}")
    return int(text)


def _cursor(text: str | None) -> str | None:
    return None if text is None else parse_session_id(text, field="cursor")


def _flag(text: str | None, *, field: str) -> bool:
    if text not in (None, "true", "false", "1", "0"):
        raise HintError(field, "must be true or false")
    return text in ("true", "1")
