"""Which requests are ours to look at."""

from __future__ import annotations

import pytest
from starlette._utils import get_route_path

from sam_connector.middleware.endpoints import Dialect, endpoint_of, route_path
from tests.middleware.driver import CARRIER_PATHS, INFERENCE_PATHS, http_scope


@pytest.mark.parametrize("path", INFERENCE_PATHS)
@pytest.mark.parametrize("root_path", ["", "/api", "/api/v1"])
def test_inference_routes_are_known_under_any_root_path(
    path: str, root_path: str
) -> None:
    endpoint = endpoint_of(http_scope("POST", root_path + path, root_path=root_path))
    assert endpoint is not None
    assert endpoint.dialect is not Dialect.CARRIER


@pytest.mark.parametrize("path", CARRIER_PATHS)
def test_carriers_are_known(path: str) -> None:
    endpoint = endpoint_of(http_scope("POST", path))
    assert endpoint is not None
    assert endpoint.dialect is Dialect.CARRIER


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("OPTIONS", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1"),
        ("POST", "/"),
        ("POST", "/v1/agent/sessions/s/edits"),
    ],
)
def test_other_requests_are_not_ours(method: str, path: str) -> None:
    assert endpoint_of(http_scope(method, path)) is None


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_protocols_are_not_ours(kind: str) -> None:
    assert endpoint_of({"type": kind, "path": "/v1/chat/completions"}) is None


def test_a_final_line_break_matches_the_route_and_so_is_ours() -> None:
    """Otherwise a client could pass its body by us with one more character."""
    assert endpoint_of(http_scope("POST", "/v1/chat/completions%0A")) is not None


@pytest.mark.parametrize("root_path", ["", "/", "/api", "/v1", "/ap"])
@pytest.mark.parametrize(
    "path",
    ["/api/v1/completions", "/v1/completions", "/api", "/", "/apiv1/completions"],
)
def test_the_path_is_the_one_that_routing_sees(path: str, root_path: str) -> None:
    scope = http_scope("POST", path, root_path=root_path)
    expected = get_route_path(scope)
    assert route_path(scope) in (expected, path if expected == "" else expected)
