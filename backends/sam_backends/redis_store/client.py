"""The way to servers behind TLS, Sentinel or Cluster: redis-py all the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import redis.exceptions
from redis.cluster import ClusterNode, RedisCluster
from redis.sentinel import Sentinel
from typing_extensions import override

from sam_backends.redis_store.runner import (
    Command,
    Reply,
    Runner,
    cut,
    error_of,
    timeout,
)
from sam_backends.redis_store.target import Target, Topology
from sam_connector.errors import StoreError, StoreUnavailable
from sam_connector.storage.port import Entry

#: Bounds of one round trip.
_MAX_COMMANDS = 1_000
_MAX_BYTES = 8 << 20

_CLOSED = StoreUnavailable("the store is closed")


class ClientRunner(Runner):
    """A client of redis-py, made at the first call and again until that succeeds.

    Its sockets have timeouts of their own, so that a call may exceed its deadline by
    one of them; what is left of it is not begun then.

    Args:
        target: where to.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._client: Any = None
        self._is_closed = False

    @property
    @override
    def has_scripts_over_many_keys(self) -> bool:
        return self._target.topology is not Topology.CLUSTER

    @override
    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        replies: list[Reply] = []
        for start in range(0, len(commands), _MAX_COMMANDS):
            batch = commands[start : start + _MAX_COMMANDS]
            replies += self._pipeline(batch, deadline)
        return replies

    @override
    def write(
        self, entries: Sequence[Entry], ttl_ms: int, deadline: float
    ) -> list[Reply]:
        replies: list[Reply] = []
        for batch in _batches(entries):
            commands: list[Any] = []
            for entry in batch:
                key = str(entry.key)
                value = b"".join(entry.buffers)
                commands.append(("SET", key, value, "NX", "PX", ttl_ms))
                commands.append(("PEXPIRE", key, ttl_ms, "GT"))
            pairs = iter(self._pipeline(commands, deadline))
            for written in pairs:
                lengthened = next(pairs)
                failed = [r for r in (written, lengthened) if isinstance(r, StoreError)]
                replies.append(failed[0] if failed else 1)
        return replies

    @override
    def read(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        replies: list[Reply] = []
        for batch in _batches(entries):
            commands = [("GET", str(entry.key)) for entry in batch]
            for entry, value in zip(
                batch, self._pipeline(commands, deadline), strict=True
            ):
                replies.append(_place(entry, value))
        return replies

    @override
    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _pipeline(self, commands: Sequence[Any], deadline: float) -> list[Reply]:
        if time.monotonic() >= deadline:
            return [timeout()] * len(commands)
        try:
            client = self._connected()
            pipeline = _make_pipeline(client)
            for command in commands:
                pipeline.execute_command(*command)
            return [_reply(reply) for reply in pipeline.execute(raise_on_error=False)]
        except Exception as error:
            # What redis-py raises depends on where in its machinery a server broke.
            failure = _error(error)
            return [failure] * len(commands)

    def _connected(self) -> Any:
        with self._lock:
            if self._is_closed:
                raise _Closed
            if self._client is None:
                self._client = _MAKERS[self._target.topology](self._target)
            return self._client


class _Closed(Exception):
    """The runner is closed."""


def _make_standalone(target: Target) -> Any:
    return redis.Redis(**target.options, max_connections=64)


def _make_sentinel(target: Target) -> Any:
    options = dict(target.options)
    sentinel_options = {
        name: options[name]
        for name in ("socket_timeout", "socket_connect_timeout", "retry")
    }
    sentinel = Sentinel(target.nodes, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    return sentinel.master_for(target.service, **options)  # type: ignore[no-untyped-call]


def _make_cluster(target: Target) -> Any:
    nodes = [ClusterNode(host, port) for host, port in target.nodes]  # type: ignore[no-untyped-call]
    return RedisCluster(startup_nodes=nodes, **target.options)  # type: ignore[abstract]


_MAKERS: dict[Topology, Callable[[Target], Any]] = {
    Topology.STANDALONE: _make_standalone,
    Topology.SENTINEL: _make_sentinel,
    Topology.CLUSTER: _make_cluster,
}


def _make_pipeline(client: Any) -> Any:
    if isinstance(client, RedisCluster):
        return client.pipeline()
    return client.pipeline(transaction=False)


def _batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    batches: list[list[Entry]] = []
    num_bytes = _MAX_BYTES
    for entry in entries:
        if num_bytes + entry.num_bytes > _MAX_BYTES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(entry)
        num_bytes += entry.num_bytes
    return batches


def _place(entry: Entry, value: Reply) -> Reply:
    if not isinstance(value, bytes):
        return value
    if len(value) != entry.num_bytes:
        return None
    start, view = 0, memoryview(value)
    for buffer in entry.buffers:
        buffer[:] = view[start : start + len(buffer)]
        start += len(buffer)
    return 1


def _reply(reply: Any) -> Reply:
    if isinstance(reply, Exception):
        return _error(reply)
    if isinstance(reply, bool):
        return int(reply)
    if isinstance(reply, str):
        return reply.encode()
    if reply is None or isinstance(reply, int | bytes):
        return reply
    return StoreUnavailable(f"a reply of type {type(reply).__name__}")


def _error(error: Exception) -> StoreError:
    if isinstance(error, _Closed):
        return _CLOSED
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return timeout()
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return error_of(f"OOM {error}")
    if isinstance(
        error,
        redis.exceptions.AuthenticationError
        | redis.exceptions.NoPermissionError
        | redis.exceptions.AuthorizationError,
    ):
        return error_of(f"NOPERM {error}")
    if isinstance(error, redis.exceptions.ConnectionError):
        return cut(error)
    return error_of(str(error))
