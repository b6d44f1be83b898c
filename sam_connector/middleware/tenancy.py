"""Whose sessions a request may speak of."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property

from starlette.applications import Starlette
from starlette.datastructures import Headers

#: Hexadecimal digits of the key's hash: enough that no two keys in use collide.
TENANT_LENGTH = 16
NO_TENANT = ""


class Tenancy:
    """Derives the tenant from the API key, where the server checks keys.

    A key that nobody checks proves nothing, so without the check there is one
    tenant. The key itself never leaves this class.

    Args:
        app: the server's application.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    @cached_property
    def enforced(self) -> bool:
        """Whether the server checks API keys; asked first when it serves."""
        if any(
            getattr(middleware.cls, "__name__", "") == "AuthenticationMiddleware"
            for middleware in self._app.user_middleware
        ):
            return True
        args = getattr(self._app.state, "args", None)
        keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        return any(keys)

    def tenant_of(self, headers: Headers) -> str:
        """The tenant that these headers prove."""
        if not self.enforced:
            return NO_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = headers.get("x-api-key", "")
        if not key:
            return NO_TENANT
        return hashlib.sha256(key.encode()).hexdigest()[:TENANT_LENGTH]
