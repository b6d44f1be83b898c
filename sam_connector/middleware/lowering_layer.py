"""The ASGI layer between the server's checks and its routing."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sam_connector.errors import HintError
from sam_connector.middleware.access import Access
from sam_connector.middleware.endpoints import Dialect, Endpoint, endpoint_of
from sam_connector.middleware.errors import ApiError, error_response
from sam_connector.middleware.managed_answers import managed_response
from sam_connector.middleware.request_body import (
    TOO_LARGE,
    ReceivedBody,
    mentions_hint,
    read_body,
    watched,
)
from sam_connector.middleware.rewrite import ManagedRequest, Rewritten, rewrite
from sam_connector.protocol.control import ApplyEdits

SESSION_HEADER = "x-session-id"
#: How long a management request waits for operations that take time; one that takes
#: longer is answered ``accepted`` and goes on.
MANAGE_WAIT_S = 5.0


class LoweringLayer:
    """Takes hints out of request bodies and answers management requests.

    Requests that carry no hint reach ``app`` with the same bytes, whatever they are;
    requests to other routes, websockets and lifespan with the very same objects.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoint_of(scope)
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        tenancy = self._access.tenancy
        if endpoint.dialect is Dialect.CARRIER and not tenancy.enforced:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = tenancy.tenant_of(headers)
        received = await read_body(receive, self._access.max_body_bytes)
        if received.is_too_large:
            await self._pass_large(endpoint, received, scope, receive, send)
        elif received.departure is not None or not _concerns_us(
            received.body, headers, tenant
        ):
            await self.app(scope, received.replay(receive), send)
        else:
            await self._handle(endpoint, tenant, received, scope, receive, send)

    async def _handle(
        self,
        endpoint: Endpoint,
        tenant: str,
        received: ReceivedBody,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        response: Response
        try:
            outcome = rewrite(
                received.body,
                endpoint=endpoint,
                session_header=Headers(scope=scope).get(SESSION_HEADER),
                tenant=tenant,
            )
        except HintError as error:
            response = error_response(ApiError.of_hint(error), endpoint.dialect)
            await response(scope, receive, send)
            return
        if isinstance(outcome, ManagedRequest):
            response = await self._manage(outcome, endpoint.dialect)
            await response(scope, receive, send)
        elif isinstance(outcome, Rewritten):
            scope = _with_length(scope, len(outcome.body))
            await self.app(scope, received.replay(receive, outcome.body), send)
        else:
            await self.app(scope, received.replay(receive), send)

    async def _manage(self, request: ManagedRequest, dialect: Dialect) -> Response:
        session = request.hint.session
        outcome = await self._access.apply_edits(
            ApplyEdits(
                tenant=session.tenant,
                session_id=session.session_id,
                edits=request.hint.edits,
                wait_s=MANAGE_WAIT_S,
            )
        )
        if isinstance(outcome, ApiError):
            return error_response(outcome, dialect)
        return managed_response(
            dialect,
            model=request.model or self._access.model_name,
            hint=outcome,
            stream=request.stream,
        )

    async def _pass_large(
        self,
        endpoint: Endpoint,
        received: ReceivedBody,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        limit = self._access.max_body_bytes
        if mentions_hint(received.body):
            error = ApiError(
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                message=TOO_LARGE.format(limit=limit),
            )
            response = error_response(error, endpoint.dialect)
            await response(scope, receive, send)
            return
        rest = watched(receive, received.body, limit)
        await self.app(scope, received.replay(rest), send)


def _concerns_us(body: bytes, headers: Headers, tenant: str) -> bool:
    if mentions_hint(body):
        return True
    # vLLM's own session id needs its tenant beside it, or two tenants share it.
    return bool(tenant) and (SESSION_HEADER in headers or b"session_id" in body)


def _with_length(scope: Scope, length: int) -> Scope:
    """A scope that gives the body's new length, if it gave one."""
    headers = MutableHeaders(raw=list(scope["headers"]))
    if "content-length" in headers:
        headers["content-length"] = str(length)
    return {**scope, "headers": headers.raw}
