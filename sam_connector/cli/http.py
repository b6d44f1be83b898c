"""One HTTP call to a server's control routes, with the standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from sam_connector.cli.errors import CommandError

_ROUTES = "/v1/agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlClient:
    """Calls the control routes of one server.

    Attributes:
        url: base URL of the server, with or without a trailing ``/v1``.
        api_key: sent as a bearer token if given.
        timeout_s: for connecting and for each read.
    """

    url: str
    api_key: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise CommandError(f"{self.url!r} is no http(s) URL")

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
        extra_timeout_s: float = 0.0,
    ) -> dict[str, Any]:
        """The JSON object that ``method path`` answers.

        Raises:
            CommandError: no connection, an error status, or an answer that is no
                JSON object.
        """
        request = self._request(method, path, body, query)
        timeout_s = self.timeout_s + extra_timeout_s
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return _json_object(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise CommandError(_explain(error.code, error.read())) from None
        except urllib.error.URLError as error:
            raise CommandError(f"cannot reach {self.url}: {error.reason}") from None
        except OSError as error:
            raise CommandError(f"lost {self.url}: {error}") from None

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        query: Mapping[str, object] | None,
    ) -> urllib.request.Request:
        base = self.url.rstrip("/").removesuffix("/v1")
        suffix = f"?{urlencode(query)}" if query else ""
        headers = {"Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        return urllib.request.Request(
            f"{base}{_ROUTES}{path}{suffix}", data=data, headers=headers, method=method
        )


def session_path(session_id: str) -> str:
    """Path of one session; ids may hold slashes and anything else printable."""
    return f"/sessions/{quote(session_id, safe='')}"


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except ValueError:
        raise CommandError("the server's answer is not JSON") from None
    if not isinstance(answer, dict):
        raise CommandError("the server's answer is not a JSON object")
    return answer


def _explain(status: int, raw: bytes) -> str:
    message = _error_message(raw)
    if message:
        return f"{message} (HTTP {status})"
    if status == HTTPStatus.UNAUTHORIZED:
        return "the server wants an API key: --api-key or VLLM_API_KEY (HTTP 401)"
    if status == HTTPStatus.NOT_FOUND:
        return (
            "the server has no control routes: was it started with --middleware "
            "sam_connector.AgentHintMiddleware? (HTTP 404)"
        )
    return f"the server answered HTTP {status}"


def _error_message(raw: bytes) -> str | None:
    """``error.message`` of an error in the OpenAI shape."""
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, TypeError, LookupError):
        return None
    return message if isinstance(message, str) else None
