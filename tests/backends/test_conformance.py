"""Every kind of server keeps the contract of stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sam_backends.embedded import EmbeddedServer
from sam_backends.redis_store import open_store
from sam_connector.storage.conformance import BLOCK_CHECKS, MANIFEST_CHECKS
from tests.backends import servers
from tests.backends.builders import OPTIONS

_USER, _PASSWORD = "sam", "p@ss:word/#%"
_QUOTED = "p%40ss%3Aword%2F%23%25"


@contextmanager
def _embedded(directory: Path) -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.url


@contextmanager
def _tcp(directory: Path) -> Iterator[str]:
    with servers.redis_server(directory) as server:
        yield f"{server.url}/3"


@contextmanager
def _unix(directory: Path) -> Iterator[str]:
    with servers.redis_server(directory, requirepass=_PASSWORD) as server:
        yield f"unix://:{_QUOTED}@{server.socket_path}?db=2"


@contextmanager
def _tls(directory: Path) -> Iterator[str]:
    with servers.tls_server(directory, _USER, _PASSWORD) as server:
        yield (
            f"rediss://{_USER}:{_QUOTED}@127.0.0.1:{server.port}"
            f"?ssl_ca_certs={directory / 'ca.crt'}"
        )


@contextmanager
def _sentinel(directory: Path) -> Iterator[str]:
    with servers.sentinel_group(directory) as group:
        yield group.url


@contextmanager
def _cluster(directory: Path) -> Iterator[str]:
    with servers.cluster(directory) as cluster:
        yield cluster.url


_Starter = Callable[[Path], AbstractContextManager[str]]

_STARTERS: dict[str, _Starter] = {
    "embedded": _embedded,
    "tcp": _tcp,
    "unix": _unix,
    "tls": _tls,
    "sentinel": _sentinel,
    "cluster": _cluster,
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("embedded"),
        pytest.param("tcp", marks=[pytest.mark.redis, pytest.mark.slow]),
        pytest.param("unix", marks=[pytest.mark.redis, pytest.mark.slow]),
        pytest.param("tls", marks=[pytest.mark.redis, pytest.mark.slow]),
        pytest.param("sentinel", marks=[pytest.mark.redis, pytest.mark.slow]),
        pytest.param("cluster", marks=[pytest.mark.redis, pytest.mark.slow]),
    ],
)
def url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    directory = tmp_path_factory.mktemp(request.param)
    with _STARTERS[request.param](directory) as url:
        yield url


@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", BLOCK_CHECKS, ids=lambda check: check.__name__)
def test_blocks(check: Callable[[Any, Any], None], url: str) -> None:
    check(lambda: open_store(url, OPTIONS).blocks, time.sleep)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", MANIFEST_CHECKS, ids=lambda check: check.__name__)
def test_manifests(check: Callable[[Any, Any], None], url: str) -> None:
    check(lambda: open_store(url, OPTIONS).manifests, time.sleep)
