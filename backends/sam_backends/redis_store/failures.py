"""What went wrong, in the port's words; one place for both ways to a server."""

from __future__ import annotations

import redis.exceptions

from sam_connector.errors import (
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)

CLOSED = StoreUnavailable("the store is closed")

_DENIED = ("NOAUTH", "WRONGPASS", "NOPERM", "ERR invalid password", "ERR AUTH")


def reply_of_error(message: str) -> StoreError | None:
    """What an error reply is to us: of another type than ours there is no value."""
    return None if message.startswith("WRONGTYPE") else error_of_reply(message)


def error_of_reply(message: str) -> StoreError:
    """Of an error reply, which begins with a word in capitals."""
    if message.startswith("OOM"):
        return StoreFull(message)
    if message.startswith(_DENIED):
        return StoreDenied(message)
    if message.startswith(("MOVED", "ASK")):
        return StoreUnavailable(f"a cluster needs a redis+cluster:// URL ({message})")
    return StoreUnavailable(message)


def error_of_exception(error: Exception) -> StoreError:
    """Of what redis-py raises; it has taken the first word off some messages."""
    # Before ConnectionError: that is what it is to redis-py.
    if isinstance(
        error,
        redis.exceptions.AuthenticationError
        | redis.exceptions.NoPermissionError
        | redis.exceptions.AuthorizationError,
    ):
        return StoreDenied(str(error))
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return timed_out()
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreFull(str(error))
    if isinstance(error, redis.exceptions.ConnectionError | OSError):
        return cut(error)
    return error_of_reply(str(error))


def timed_out() -> StoreTimeout:
    return StoreTimeout("the store did not answer in time")


def cut(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the connection failed: {error}")
