"""redis-py's path: failover, lost nodes, and what a call then answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sam_backends.redis_store import open_store
from sam_connector.errors import StoreDenied, StoreUnavailable
from sam_connector.storage.port import Outcome, StoreBackend
from tests.backends import servers
from tests.backends.builders import (
    OPTIONS,
    is_right,
    make_keys,
    soon,
    sources,
    target,
    targets,
)

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(60)]


def _write(store: StoreBackend, count: int) -> list[Outcome]:
    result = store.put(sources(make_keys(count)), ttl_s=100, deadline=soon(2))
    return list(result.outcomes)


def test_a_failover_is_followed(tmp_path: Path) -> None:
    """The sentinel names another master; calls fail meanwhile, and then go there."""
    with (
        servers.sentinel_group(tmp_path) as group,
        closing(open_store(group.url, OPTIONS).blocks) as store,
    ):
        assert _write(store, 3) == [DONE] * 3
        group.master.do("WAIT", 1, 1_000)
        group.master.kill()
        assert _write(store, 3) == [FAILED] * 3
        servers.wait_until(lambda: _write(store, 3) == [DONE] * 3, "a new master")
        entries = targets(make_keys(3))
        assert store.get(entries, deadline=soon()).outcomes == [DONE] * 3
        assert all(map(is_right, entries))


def test_a_lost_node_of_a_cluster_takes_its_slots_with_it(tmp_path: Path) -> None:
    """Others are served, no call is late, and all is well when it is back."""
    with (
        servers.cluster(tmp_path) as cluster,
        closing(open_store(cluster.url, OPTIONS).blocks) as store,
    ):
        for node in cluster.nodes:
            node.do("CONFIG", "SET", "cluster-require-full-coverage", "no")
        assert _write(store, 60) == [DONE] * 60
        cluster.nodes[0].kill()
        start = time.monotonic()
        result = store.get(targets(make_keys(60)), deadline=start + 1)
        assert time.monotonic() - start < 5
        assert FAILED in result.outcomes
        assert isinstance(result.error, StoreUnavailable)
        # The node forgets the cluster with its directory's nodes.conf kept.
        cluster.nodes[0].start()
        servers.wait_until(lambda: _write(store, 60) == [DONE] * 60, "all slots")


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[servers.Server]:
    with servers.tls_server(tmp_path, "sam", "right") as server:
        yield server


@pytest.mark.parametrize(
    ("credentials", "query", "error"),
    [
        ("sam:wrong@", "?ssl_ca_certs={ca}", StoreDenied),
        ("", "?ssl_ca_certs={ca}", StoreDenied),
        ("sam:right@", "", StoreUnavailable),
    ],
)
def test_what_tls_and_acl_refuse(
    tls: servers.Server, credentials: str, query: str, error: type[Exception]
) -> None:
    """Wrong or no password; a certificate that nobody we trust has signed."""
    ca = tls.directory / "ca.crt"
    url = f"rediss://{credentials}127.0.0.1:{tls.port}{query.format(ca=ca)}"
    with closing(open_store(url, OPTIONS).blocks) as store:
        result = store.get([target(make_keys(1)[0])], deadline=soon())
    assert result.outcomes == [FAILED]
    assert isinstance(result.error, error), result.error
    assert "wrong" not in str(result.error)
