"""Where a store is: from its URL to what redis-py makes connections of."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

from sam_backends.redis_store.sockets import (
    DEFAULT_TIMEOUT_S,
    TcpConnection,
    TlsConnection,
    UnixConnection,
)
from sam_connector.errors import ConfigurationError, StoreError
from sam_connector.storage.registry import StoreOptions, redact

_ALIASES = {"valkey": "redis", "valkeys": "rediss"}

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379

#: What may stand behind the question mark. redis-py knows many more, of which some
#: would take from us what we rely on.
_OPTIONS = frozenset({"client_name", "db"})
_TLS_OPTIONS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_keyfile",
        "ssl_password",
    }
)
_SENTINEL_OPTIONS = frozenset({"sentinel_password", "sentinel_username"})


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
        connection_class: for its servers.
        options: for that class.
        sentinel_options: for connections to sentinels.
        num_connections: to one server, for the values of one batch.
    """

    topology: Topology
    nodes: list[tuple[str, int]]
    service: str = ""
    connection_class: type[Any]
    options: Mapping[str, Any] = field(repr=False)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    num_connections: int

    @property
    def is_direct(self) -> bool:
        """Whether its bytes can go over sockets of ours."""
        is_alone = self.topology is Topology.STANDALONE
        return is_alone and self.connection_class is not TlsConnection

    def make_connection(self) -> Any:
        """A connection to a standalone server, not made yet."""
        return self.connection_class(**self.options)

    def scrubbed(self, error: StoreError) -> StoreError:
        """Takes passwords out of what a server says: some repeat what they got."""
        text = str(error)
        for options in (self.options, self.sentinel_options):
            for name in ("password", "ssl_password"):
                if secret := options.get(name):
                    text = text.replace(secret, "***")
        return type(error)(text)


def parse(url: str, options: StoreOptions) -> Target:
    """Reads a URL; what redis-py understands is left to it.

    Raises:
        ConfigurationError: it is not right; the text has no password.
    """
    try:
        return _parse(url, options)
    except _UrlError as error:
        reason = str(error)
    except Exception:
        # Their texts have parts of the URL in them: of a password, if that is what
        # made it unreadable.
        reason = "not readable; is everything in it percent-encoded?"
    raise ConfigurationError([f"store {redact(url)}: {reason}"])


class _UrlError(ValueError):
    """With a reason that contains no secret."""


def _parse(url: str, options: StoreOptions) -> Target:
    scheme, slashes, rest = url.partition("://")
    if not slashes or not rest:
        raise _UrlError("it needs a host or a path")
    protocol, _, variant = _ALIASES.get(scheme.lower(), scheme.lower()).partition("+")
    if variant == "unix":
        protocol, variant = "unix", ""
    common: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": DEFAULT_TIMEOUT_S,
        "socket_connect_timeout": options.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if variant:
        return _parse_group(protocol, variant, rest, common, options)
    _check_options(rest, protocol, frozenset())
    found = parse_url(f"{protocol}://{rest}")  # type: ignore[no-untyped-call]
    found.pop("connection_class", None)
    is_unix = protocol == "unix"
    path = urlsplit(url).path.strip("/")
    if is_unix and not path:
        raise _UrlError("it needs the path of a socket")
    if not is_unix:
        found["db"] = _database(path) if path else found.get("db", 0)
    connection_class = UnixConnection if is_unix else _class(protocol)
    return _checked(
        Target(
            topology=Topology.STANDALONE,
            nodes=[(found.get("host", "localhost"), found.get("port", _DEFAULT_PORT))],
            connection_class=connection_class,
            options={**found, **common},
            num_connections=options.num_connections,
        )
    )


def _parse_group(
    protocol: str,
    variant: str,
    rest: str,
    common: Mapping[str, Any],
    options: StoreOptions,
) -> Target:
    """``redis+sentinel://user:pass@h1:p1,h2:p2/service/db`` and ``redis+cluster``."""
    topology = Topology[variant.upper()]
    is_sentinel = topology is Topology.SENTINEL
    parts = urlsplit(f"//{rest}")
    _check_options(rest, protocol, _SENTINEL_OPTIONS if is_sentinel else frozenset())
    credentials, at, hosts = parts.netloc.rpartition("@")
    # Whatever does not name a server means the same as with a single one.
    single = f"{protocol}://{credentials}{at}localhost/?{parts.query}"
    given = parse_url(single)  # type: ignore[no-untyped-call]
    for name in ("connection_class", "host"):
        given.pop(name, None)
    sentinel = {
        name: given.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in given
    }
    service, _, database = parts.path.strip("/").partition("/")
    if is_sentinel and not service:
        raise _UrlError("it needs the service's name: /SERVICE or /SERVICE/DB")
    if database:
        given["db"] = _database(database)
    if not is_sentinel and (service or given.pop("db", 0)):
        raise _UrlError("a cluster has no databases")
    default_port = _DEFAULT_SENTINEL_PORT if is_sentinel else _DEFAULT_PORT
    tls = {name: value for name, value in given.items() if name in _TLS_OPTIONS}
    return _checked(
        Target(
            topology=topology,
            nodes=[_node(host, default_port) for host in hosts.split(",")],
            service=unquote(service),
            connection_class=_class(protocol),
            options={**given, **common},
            sentinel_options={**tls, **sentinel, **common},
            num_connections=options.num_connections,
        )
    )


def _class(protocol: str) -> type[Any]:
    return TlsConnection if protocol == "rediss" else TcpConnection


def _check_options(rest: str, protocol: str, more: frozenset[str]) -> None:
    known = _OPTIONS | more | (_TLS_OPTIONS if protocol == "rediss" else frozenset())
    given = {name for name, _ in parse_qsl(urlsplit(f"//{rest}").query, True)}
    if unknown := sorted(given - known):
        raise _UrlError(
            f"unknown {', '.join(unknown)} behind the question mark;"
            f" there are {', '.join(sorted(known))}"
        )


def _database(text: str) -> int:
    if not text.isdecimal():
        raise _UrlError(f"a database is a number, not {text!r}")
    return int(text)


def _node(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise _UrlError("a host is missing")
    return parts.hostname, parts.port or default_port


def _checked(target: Target) -> Target:
    """Lets redis-py check the options; connects to nothing."""
    target.make_connection()
    return target
