"""Errors in each endpoint's shape."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest

from sam_connector.errors import HintError
from sam_connector.middleware.endpoints import Dialect
from sam_connector.middleware.errors import ApiError, error_response

ERROR = ApiError.of_hint(HintError("agent_hint.session_id", "is required"))
OPENAI = [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.CARRIER]


@pytest.mark.parametrize("dialect", OPENAI)
def test_openai_shape(dialect: Dialect) -> None:
    response = error_response(ERROR, dialect)
    assert response.status_code == 400
    assert json.loads(bytes(response.body)) == {
        "error": {
            "message": "agent_hint.session_id: is required",
            "type": "BadRequestError",
            "param": "agent_hint.session_id",
            "code": 400,
        }
    }


def test_anthropic_shape() -> None:
    response = error_response(ERROR, Dialect.MESSAGES)
    assert response.status_code == 400
    assert json.loads(bytes(response.body)) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "agent_hint.session_id: is required",
        },
    }


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize("status", [400, 413, 503])
def test_every_status_of_an_inference_route_has_a_name(
    dialect: Dialect, status: int
) -> None:
    error = ApiError(status=HTTPStatus(status), message="m")
    assert error_response(error, dialect).status_code == status


@pytest.mark.vllm
@pytest.mark.parametrize("dialect", Dialect)
def test_shapes_are_those_of_vllm(dialect: Dialect) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.exception_handling.error_response import (
        create_error_response,
    )

    body = json.loads(bytes(error_response(ERROR, dialect).body))
    if dialect is Dialect.MESSAGES:
        assert AnthropicErrorResponse.model_validate(body).model_dump() == body
    else:
        expected = create_error_response(ERROR.message, param=ERROR.param)
        assert ErrorResponse.model_validate(body) == expected
        assert body == expected.model_dump()
