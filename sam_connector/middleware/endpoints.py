"""The inference routes whose bodies may carry a hint."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from starlette.types import Scope


class Dialect(enum.Enum):
    """Whose request and response shapes a route speaks."""

    CHAT = enum.auto()
    COMPLETIONS = enum.auto()
    RESPONSES = enum.auto()
    MESSAGES = enum.auto()
    #: Carries ``kv_transfer_params`` to the engine but has no ``agent_hint``.
    CARRIER = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One route.

    Attributes:
        dialect: whose shapes it speaks.
        has_session_id: whether its body has vLLM's own ``session_id``.
    """

    dialect: Dialect
    has_session_id: bool


_BY_PATH = {
    "/v1/chat/completions": Endpoint(dialect=Dialect.CHAT, has_session_id=True),
    "/v1/completions": Endpoint(dialect=Dialect.COMPLETIONS, has_session_id=True),
    "/v1/responses": Endpoint(dialect=Dialect.RESPONSES, has_session_id=True),
    "/v1/messages": Endpoint(dialect=Dialect.MESSAGES, has_session_id=False),
}

# A client could name another tenant on these, so with API keys they are read too.
_CARRIERS = frozenset(
    {
        "/v1/chat/completions/batch",
        "/inference/v1/generate",
        "/cohere/v2/chat",
        "/invocations",
    }
)
_CARRIER = Endpoint(dialect=Dialect.CARRIER, has_session_id=True)


def endpoint_of(scope: Scope) -> Endpoint | None:
    """The endpoint this request goes to; ``None`` for every other request."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    # Route patterns end in "$", which also matches before a final line break.
    path = route_path(scope).removesuffix("\n")
    endpoint = _BY_PATH.get(path)
    if endpoint is None and path in _CARRIERS:
        return _CARRIER
    return endpoint


def route_path(scope: Scope) -> str:
    """The path that routing sees: without ``root_path``, if it is under it."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    if root_path and path.startswith(root_path + "/"):
        return path[len(root_path) :]
    return path
