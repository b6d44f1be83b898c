"""What the lowering layer and the control routes of one application share."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, cast

from starlette.applications import Starlette

from sam_connector.core.types import Edit, EditResult, EditStatus
from sam_connector.middleware.engine_control import EngineControl, EngineCoreClient
from sam_connector.middleware.errors import ApiError
from sam_connector.middleware.tenancy import Tenancy
from sam_connector.protocol.control import ApplyEdits, FailureCode, Reply
from sam_connector.protocol.results import result_to_wire

#: Largest body that is looked into, in bytes.
DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024

_STATUS = {
    FailureCode.REJECTED: HTTPStatus.CONFLICT,
    FailureCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    FailureCode.INVALID: HTTPStatus.BAD_REQUEST,
}


class Access:
    """Tenancy and the way to the engine, for one application.

    Args:
        app: the server's application.
        max_body_bytes: largest body that is looked into.
        control: the way to the engine; by default through the client that vLLM
            keeps in ``app.state.engine_client``.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        control: EngineControl | None = None,
    ) -> None:
        self._app = app
        self.tenancy = Tenancy(app)
        self.control = control or EngineControl(self._engine_core)
        self.max_body_bytes = max_body_bytes

    @property
    def model_name(self) -> str:
        """The first name under which the server serves its model."""
        args = getattr(self._app.state, "args", None)
        names = getattr(args, "served_model_name", None) or [
            getattr(args, "model", None)
        ]
        return str(names[0] or "")

    async def apply_edits(self, command: ApplyEdits) -> dict[str, Any] | ApiError:
        """Applies edits; a session the engine does not know is a result, no error."""
        if not command.edits:
            return {"session_id": command.session_id, "results": []}
        reply = await self.control.call(command)
        if reply.code is FailureCode.REJECTED:
            results = [_rejected(edit, reply.reason) for edit in command.edits]
            return {"session_id": command.session_id, "results": results}
        return reply.result if reply.ok else failure_of(reply)

    def _engine_core(self) -> EngineCoreClient | None:
        client = getattr(self._app.state, "engine_client", None)
        return cast("EngineCoreClient | None", getattr(client, "engine_core", None))


def failure_of(reply: Reply) -> ApiError:
    """The error a client sees for a command that was not carried out."""
    assert reply.code is not None
    return ApiError(status=_STATUS[reply.code], message=reply.reason)


def _rejected(edit: Edit, reason: str) -> dict[str, Any]:
    return result_to_wire(
        EditResult(type=edit.type, status=EditStatus.REJECTED, reason=reason)
    )
