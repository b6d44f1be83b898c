from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from benchmarks.store_bandwidth.clients import (
    Client,
    Limit,
    Ours,
    compiled,
    installed,
)
from benchmarks.store_bandwidth.workload import Workload, WrongBytesError

pytestmark = pytest.mark.redis

ALL = [Limit, Ours, *installed()[0]]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    with compiled():
        yield


@pytest.fixture(params=[10_000, 300_000], ids=["small", "large"])
def workload(request: pytest.FixtureRequest, tmp_path: Path) -> Workload:
    return Workload.make(tmp_path, size=request.param, num_bytes=40 * request.param)


@pytest.mark.parametrize("num_connections", [1, 2, 3])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_every_client_writes_and_reads_everything(
    kind: type[Client], num_connections: int, workload: Workload, port: int
) -> None:
    client = kind(port, num_connections)  # type: ignore[call-arg]
    try:
        assert client.set(workload) > 0
        with redis.Redis(port=port) as admin:
            for key, value in zip(workload.keys, workload.values, strict=True):
                assert admin.get(str(key)) == bytes(value)
        assert client.get(workload) > 0
        if kind is not Limit:
            workload.check(client.name)
    finally:
        client.close()


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_wrong_bytes_are_noticed(
    kind: type[Client], workload: Workload, port: int
) -> None:
    client = kind(port, 2)  # type: ignore[call-arg]
    try:
        client.set(workload)
        with redis.Redis(port=port) as admin:
            admin.setrange(str(workload.keys[-1]), workload.size - 1, b"!")
        with pytest.raises(WrongBytesError, match=re.escape(client.name)):
            _get_checked(client, workload)
    finally:
        client.close()


def test_ours_says_what_is_missing(workload: Workload, port: int) -> None:
    client = Ours(port, 1)
    try:
        with pytest.raises(RuntimeError, match="ours"):
            client.get(workload)
    finally:
        client.close()


def test_versions_of_all_libraries_are_told() -> None:
    _, versions = installed()
    assert set(versions) == {"redis", "hiredis", "valkey-glide-sync", "lmcache"}


def _get_checked(client: Client, workload: Workload) -> None:
    client.get(workload)
    workload.check(client.name)
