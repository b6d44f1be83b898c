"""The way to servers behind TLS, Sentinel or Cluster: redis-py all the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel
from typing_extensions import override

from sam_backends.redis_store.failures import (
    CLOSED,
    error_of_exception,
    error_of_reply,
    reply_of_error,
)
from sam_backends.redis_store.runner import Command, Reply, Runner
from sam_backends.redis_store.sockets import (
    SentinelTcpConnection,
    SentinelTlsConnection,
    TlsConnection,
    seconds_left,
    until,
)
from sam_backends.redis_store.target import Target, Topology
from sam_connector.errors import StoreError, StoreUnavailable
from sam_connector.storage.port import Entry

#: Bounds of one round trip.
_MAX_COMMANDS = 1_000
_MAX_BYTES = 8 << 20

#: Writes a value that lives at least so long, and no shorter than what it replaces.
#: A script, because a transaction of redis-py's for a cluster is not in all versions.
_PUT = b"""
local left = redis.call('PTTL', KEYS[1])
local ttl = tonumber(ARGV[2])
if left > ttl then ttl = left end
redis.call('SET', KEYS[1], ARGV[1], 'PX', string.format('%d', ttl))
return 1
"""


class ClientRunner(Runner):
    """A client of redis-py, made at the first call and again until that succeeds.

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
            commands = [
                ("EVAL", _PUT, 1, str(e.key), b"".join(e.buffers), ttl_ms)
                for e in batch
            ]
            replies += self._pipeline(commands, deadline)
        return replies

    @override
    def read(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        replies: list[Reply] = []
        for batch in _batches(entries):
            commands = [("GET", str(entry.key)) for entry in batch]
            values = self._pipeline(commands, deadline)
            replies += map(_place, batch, values)
        return replies

    @override
    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _pipeline(self, commands: Sequence[Any], deadline: float) -> list[Reply]:
        try:
            with until(deadline):
                seconds_left()
                pipeline = _make_pipeline(self._connected())
                for command in commands:
                    pipeline.execute_command(*command)
                replies = pipeline.execute(raise_on_error=False)
            return [self._reply(reply) for reply in replies]
        except _Closed:
            return [CLOSED] * len(commands)
        except Exception as error:
            # What redis-py raises depends on where in its machinery a server broke.
            return [self._failure(error)] * len(commands)

    def _connected(self) -> Any:
        """The client; a cluster's asks for the topology when it is made."""
        with self._locked():
            if self._is_closed:
                raise _Closed
            if self._client is None:
                self._client = _MAKERS[self._target.topology](self._target)
            return self._client

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=seconds_left()):
            raise TimeoutError
        try:
            yield
        finally:
            self._lock.release()

    def _reply(self, reply: Any) -> Reply:
        if isinstance(reply, Exception):
            is_none = reply_of_error(str(reply)) is None
            return None if is_none else self._failure(reply)
        if isinstance(reply, bool):
            return int(reply)
        if isinstance(reply, str):
            return reply.encode()
        if reply is None or isinstance(reply, int | bytes):
            return reply
        return StoreUnavailable(f"a reply of type {type(reply).__name__}")

    def _failure(self, error: Exception) -> StoreError:
        return self._target.scrubbed(_failure(error))


class _Closed(Exception):
    """The runner is closed."""


def _failure(error: Exception) -> StoreError:
    # So that NOSCRIPT is known as such however it came.
    if isinstance(error, redis.exceptions.NoScriptError):
        return error_of_reply("NOSCRIPT")
    return error_of_exception(error)


def _make_standalone(target: Target) -> Any:
    pool = redis.ConnectionPool(
        connection_class=target.connection_class, **target.options
    )
    return redis.Redis(connection_pool=pool)


def _make_sentinel(target: Target) -> Any:
    is_tls = target.connection_class is TlsConnection
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        target.nodes, sentinel_kwargs={**target.sentinel_options, "ssl": is_tls}
    )
    for each in sentinel.sentinels:
        each.connection_pool.connection_class = target.connection_class
    return sentinel.master_for(  # type: ignore[no-untyped-call]
        target.service,
        connection_class=SentinelTlsConnection if is_tls else SentinelTcpConnection,
        **target.options,
    )


def _make_cluster(target: Target) -> Any:
    nodes = [ClusterNode(host, port) for host, port in target.nodes]  # type: ignore[no-untyped-call]
    # redis-py's nodes take a class for connections only if there was a URL.
    host, port = target.nodes[0]
    options = {**target.options, "retry": Retry(NoBackoff(), 2)}
    return RedisCluster(
        url=f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}",
        startup_nodes=nodes,
        connection_class=target.connection_class,
        **options,
    )


_MAKERS: dict[Topology, Callable[[Target], Any]] = {
    Topology.STANDALONE: _make_standalone,
    Topology.SENTINEL: _make_sentinel,
    Topology.CLUSTER: _make_cluster,
}


def _make_pipeline(client: Any) -> Any:
    if isinstance(client, RedisCluster):
        return client.pipeline()  # type: ignore[no-untyped-call]
    return client.pipeline(transaction=False)


def _batches(entries: Sequence[Entry]) -> list[list[Entry]]:
    batches: list[list[Entry]] = []
    num_bytes = _MAX_BYTES
    for entry in entries:
        if (
            num_bytes + entry.num_bytes > _MAX_BYTES
            or len(batches[-1]) == _MAX_COMMANDS
        ):
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
