"""URLs become what redis-py makes connections of."""

from __future__ import annotations

from typing import Any

import pytest

from sam_backends.redis_store.sockets import (
    TcpConnection,
    TlsConnection,
    UnixConnection,
)
from sam_backends.redis_store.target import Target, Topology, parse
from sam_connector.errors import ConfigurationError, StoreDenied
from sam_connector.storage.registry import StoreOptions

_OPTIONS = StoreOptions(connect_timeout_s=0.125, num_connections=3)


def _parse(url: str) -> Target:
    return parse(url, _OPTIONS)


def _given(target: Target, *names: str) -> list[Any]:
    return [target.options.get(name) for name in names]


@pytest.mark.parametrize("scheme", ["redis", "valkey", "REDIS"])
def test_all_parts_of_a_url_count(scheme: str) -> None:
    target = _parse(f"{scheme}://u%3A:p%40ss@[::1]:6380/3?client_name=me")
    assert _given(target, "host", "port", "db") == ["::1", 6380, 3]
    assert _given(target, "username", "password") == ["u:", "p@ss"]
    assert _given(target, "client_name") == ["me"]
    assert target.connection_class is TcpConnection
    assert target.topology is Topology.STANDALONE
    assert target.is_direct
    assert target.num_connections == 3


def test_a_bare_host_has_defaults() -> None:
    target = _parse("redis://host")
    assert target.nodes == [("host", 6379)]
    assert _given(target, "db", "username", "password") == [0, None, None]


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls_is_left_to_redis_py(scheme: str) -> None:
    target = _parse(f"{scheme}://host/1?ssl_ca_certs=/ca&ssl_cert_reqs=none")
    assert target.connection_class is TlsConnection
    assert _given(target, "ssl_ca_certs", "db") == ["/ca", 1]
    assert not target.is_direct


def test_tls_options_need_tls() -> None:
    with pytest.raises(ConfigurationError, match="ssl_ca_certs"):
        _parse("redis://host?ssl_ca_certs=/ca")


@pytest.mark.parametrize("scheme", ["unix", "redis+unix"])
def test_a_unix_socket(scheme: str) -> None:
    target = _parse(f"{scheme}://u:p@/run/my%20redis.sock?db=2")
    assert target.connection_class is UnixConnection
    assert _given(target, "path", "db") == ["/run/my redis.sock", 2]
    assert _given(target, "username", "password") == ["u", "p"]
    assert target.is_direct


def test_sentinels_have_credentials_of_their_own() -> None:
    target = _parse(
        "rediss+sentinel://u:p%2Css@h1:1,[::2],h3:3/my%20service/4"
        "?sentinel_username=su&sentinel_password=sp&ssl_ca_certs=/ca"
    )
    assert target.topology is Topology.SENTINEL
    assert target.nodes == [("h1", 1), ("::2", 26379), ("h3", 3)]
    assert target.service == "my service"
    names = ("username", "password", "db", "ssl_ca_certs")
    assert _given(target, *names) == ["u", "p,ss", 4, "/ca"]
    sentinel = [target.sentinel_options.get(name) for name in names]
    assert sentinel == ["su", "sp", None, "/ca"]
    assert "sentinel_password" not in target.options
    assert not target.is_direct


def test_a_cluster_has_nodes_and_no_databases() -> None:
    target = _parse("redis+cluster://:p@h1,h2:7001")
    assert target.topology is Topology.CLUSTER
    assert target.nodes == [("h1", 6379), ("h2", 7001)]
    assert _given(target, "password", "db") == ["p", None]
    with pytest.raises(ConfigurationError, match="no databases"):
        _parse("redis+cluster://h1?db=1")


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://h",
        "unix:///s",
        "redis+cluster://h",
        "redis+sentinel://h/s",
    ],
)
def test_d09_every_connection_has_timeouts(url: str) -> None:
    """Whatever redis-py's defaults are; and it does not retry on its own."""
    target = _parse(url)
    timeouts = _given(target, "socket_timeout", "socket_connect_timeout")
    assert timeouts == [0.5, 0.125]
    assert target.options["retry"].get_retries() == 0
    if target.topology is Topology.SENTINEL:
        assert target.sentinel_options["socket_timeout"] == 0.5


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://", "host or a path"),
        ("redis:host", "host or a path"),
        ("redis://h/x", "database"),
        ("redis://h/1/2", "database"),
        ("redis://h?db=x", "readable"),
        ("redis://h?protocol=3", "protocol"),
        ("redis://h?decode_responses=1", "decode_responses"),
        ("redis://h:port", "readable"),
        ("unix://", "path"),
        ("redis+sentinel://h", "service"),
        ("redis+sentinel://h/s/x", "database"),
        ("redis+cluster://h,", "host is missing"),
        ("redis+other://h", "readable"),
    ],
)
def test_what_is_wrong_is_said(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        _parse(url)


def test_errors_lose_passwords_and_keep_their_type() -> None:
    target = _parse("redis+sentinel://u:s3cret@h/s?sentinel_password=other")
    error = target.scrubbed(StoreDenied("for s3cret and other"))
    assert isinstance(error, StoreDenied)
    assert str(error) == "for *** and ***"
    assert "s3cret" not in repr(target)
