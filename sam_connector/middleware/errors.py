"""Errors in the shape of the endpoint that was asked."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import JSONResponse

from sam_connector.errors import HintError
from sam_connector.middleware.endpoints import Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """What went wrong, in no dialect yet."""

    status: HTTPStatus
    message: str
    param: str | None = None

    @classmethod
    def of_hint(cls, error: HintError) -> ApiError:
        return cls(status=HTTPStatus.BAD_REQUEST, message=str(error), param=error.field)


# vLLM's names for OpenAI's error types, and Anthropic's own.
_OPENAI_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestEntityTooLargeError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "api_error",
}


def error_response(error: ApiError, dialect: Dialect = Dialect.CHAT) -> JSONResponse:
    """The error as this dialect words it."""
    if dialect is Dialect.MESSAGES:
        content = {
            "type": "error",
            "error": {"type": _ANTHROPIC_TYPES[error.status], "message": error.message},
        }
    else:
        content = {
            "error": {
                "message": error.message,
                "type": _OPENAI_TYPES[error.status],
                "param": error.param,
                "code": int(error.status),
            }
        }
    return JSONResponse(content, status_code=error.status)
