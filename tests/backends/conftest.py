"""Servers for tests of stores: one of each kind for the tests that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sam_backends.embedded import EmbeddedServer
from sam_backends.redis_store import open_store
from sam_connector.storage.port import ManifestStore, StoreBackend
from tests.backends import servers
from tests.backends.builders import OPTIONS
from tests.backends.fault_proxy import FaultProxy

#: Whoever asks for one of these needs a ``redis-server``.
_NEED_REDIS = {"own_redis", "redis_7"}


@pytest.fixture(scope="session")
def embedded() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[servers.Server]:
    """For a test that does something to it."""
    with servers.redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def proxy(embedded: EmbeddedServer) -> Iterator[FaultProxy]:
    """In front of the embedded server."""
    with FaultProxy(embedded.socket_path) as proxy:
        yield proxy


@pytest.fixture
def fake() -> Iterator[FaultProxy]:
    """A server that has nothing and answers as it is told."""
    with FaultProxy() as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy) -> Iterator[StoreBackend]:
    """Behind the proxy."""
    with closing(open_store(proxy.url, OPTIONS).blocks) as store:
        yield store


@pytest.fixture
def manifests(proxy: FaultProxy) -> Iterator[ManifestStore]:
    """Behind the proxy."""
    opened = open_store(proxy.url, OPTIONS)
    assert opened.manifests is not None
    with closing(opened.manifests) as manifests:
        yield manifests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _NEED_REDIS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.redis)
