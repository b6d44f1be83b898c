from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("redis")

from benchmarks.store_bandwidth import servers


@pytest.fixture(params=["redis", "valkey"])
def binary(request: pytest.FixtureRequest) -> str:
    found: str | None = servers.binaries().get(request.param)
    if found is None:
        pytest.skip(f"there is no {request.param} server here")
    return found


@pytest.fixture
def port(binary: str) -> Iterator[int]:
    with servers.running(binary) as port:
        yield port
