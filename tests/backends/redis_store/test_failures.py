"""Every error of a server has its place among the port's."""

from __future__ import annotations

import pytest
import redis.exceptions

from sam_backends.redis_store.failures import error_of_exception, error_of_reply
from sam_connector.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("OOM command not allowed", StoreFull),
        ("NOAUTH Authentication required.", StoreDenied),
        ("WRONGPASS invalid username-password pair", StoreDenied),
        ("NOPERM this user has no permissions", StoreDenied),
        ("ERR invalid password", StoreDenied),
        ("MOVED 1 h:1", StoreUnavailable),
        ("ERR unknown command", StoreUnavailable),
        ("", StoreUnavailable),
    ],
)
def test_replies(message: str, kind: type[StoreError]) -> None:
    assert type(error_of_reply(message)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.exceptions.TimeoutError("x"), StoreTimeout),
        (TimeoutError("x"), StoreTimeout),
        (redis.exceptions.AuthenticationError("x"), StoreDenied),
        (redis.exceptions.NoPermissionError("x"), StoreDenied),
        (redis.exceptions.OutOfMemoryError("x"), StoreFull),
        (redis.exceptions.BusyLoadingError("x"), StoreUnavailable),
        (redis.exceptions.ReadOnlyError("x"), StoreUnavailable),
        (redis.exceptions.ClusterDownError("x"), StoreUnavailable),
        (redis.exceptions.ConnectionError("x"), StoreUnavailable),
        (OSError("x"), StoreUnavailable),
        (ValueError("x"), StoreUnavailable),
    ],
)
def test_exceptions(error: Exception, kind: type[StoreError]) -> None:
    assert type(error_of_exception(error)) is kind
