"""Where a store is: from its URL to what redis-py makes connections of."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, parse_url
from redis.retry import Retry

from sam_connector.errors import ConfigurationError
from sam_connector.storage.registry import StoreOptions, redact

_ALIASES = {"valkey": "redis", "valkeys": "rediss"}

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379

#: For what redis-py waits for itself; calls of ours have deadlines of their own.
SOCKET_TIMEOUT_S = 0.5


class Topology(enum.Enum):
    STANDALONE = enum.auto()
    SENTINEL = enum.auto()
    CLUSTER = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One store.

    Attributes:
        topology: how its servers are organised.
        nodes: host and port of each server, or sentinel, that is named.
        service: of a sentinel.
        make_connection: a connection to a standalone server, not made yet.
        options: for redis-py's clients.
        is_direct: whether its sockets are plain.
        num_connections: to one server at a time.
    """

    topology: Topology
    nodes: list[tuple[str, int]]
    service: str
    make_connection: Callable[[], Any]
    options: dict[str, Any] = field(repr=False)
    is_direct: bool
    num_connections: int


def parse(url: str, options: StoreOptions) -> Target:
    """Reads a URL; what redis-py understands is left to it.

    Raises:
        ConfigurationError: it is not right; the text has no password.
    """
    try:
        return _parse(url, options)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError([f"store {redact(url)}: {error}"]) from error


def _parse(url: str, options: StoreOptions) -> Target:
    scheme, _, rest = url.partition("://")
    if not rest:
        raise ConfigurationError([f"store {redact(url)} is no URL"])
    protocol, _, variant = _ALIASES.get(scheme, scheme).partition("+")
    common: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": options.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "lib_name": None,
        "lib_version": None,
    }
    if variant:
        return _parse_group(protocol, variant, rest, common, options)
    found = parse_url(f"{protocol}://{rest}")
    kind = found.pop("connection_class", Connection)
    arguments = {**found, **common}
    if kind is not Connection and "path" in arguments:
        arguments.pop("socket_keepalive", None)
    kind(**arguments)  # refuses unknown options; connects to nothing
    if issubclass(kind, SSLConnection):
        arguments["ssl"] = True
    return Target(
        topology=Topology.STANDALONE,
        nodes=[(found.get("host", "localhost"), found.get("port", _DEFAULT_PORT))],
        service="",
        make_connection=lambda: kind(
            **{name: value for name, value in arguments.items() if name != "ssl"}
        ),
        options=arguments,
        is_direct=not issubclass(kind, SSLConnection),
        num_connections=options.num_connections,
    )


def _parse_group(
    protocol: str,
    variant: str,
    rest: str,
    common: dict[str, Any],
    options: StoreOptions,
) -> Target:
    """``redis+sentinel://user:pass@h1:p1,h2:p2/service/db`` and ``redis+cluster``."""
    topology = Topology[variant.upper()]
    parts = urlsplit(f"//{rest}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    # The options behind the question mark are those of a single server.
    given = parse_url(f"{protocol}://localhost/?{parts.query}")
    given.pop("connection_class", None)
    given.pop("host", None)
    arguments = {**given, **common}
    if user:
        arguments["username"] = unquote(user)
    if password:
        arguments["password"] = unquote(password)
    kind = SSLConnection if protocol == "rediss" else Connection
    kind(**arguments)
    service, _, db = parts.path.strip("/").partition("/")
    if topology is Topology.SENTINEL:
        if not service:
            raise ValueError("it needs the service's name: /SERVICE")
        arguments["db"] = int(db or 0)
    elif service:
        raise ValueError("a cluster has no databases")
    if kind is SSLConnection:
        arguments["ssl"] = True
    default = _DEFAULT_PORT if topology is Topology.CLUSTER else _DEFAULT_SENTINEL_PORT
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    return Target(
        topology=topology,
        nodes=[(node.hostname or "localhost", node.port or default) for node in nodes],
        service=service,
        make_connection=lambda: None,
        options=arguments,
        is_direct=False,
        num_connections=options.num_connections,
    )
