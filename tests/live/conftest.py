"""Servers for the live tests; starting one takes most of a minute, so they share."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.live.host_tier import BLOCK_BYTES, with_tier
from tests.live.server import LiveServer, leak_check

LIVE_TIMEOUT_S = 300
SMALL_POOL = 64
#: Copies in flight; a context of nine blocks takes several steps.
FEW_BLOCKS = 4
_HERE = Path(__file__).parent
_LOG_TAIL = 8000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIVE_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test shows the end of its servers' logs."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, LiveServer):
                log = value.log_text()[-_LOG_TAIL:]
                report.sections.append((f"log of {name}", log))
    return report


@pytest.fixture(scope="session")
def live_server() -> Iterator[LiveServer]:
    """Ours, with default settings. Leave other tests' sessions alone."""
    with LiveServer() as server:
        yield server


@pytest.fixture(scope="session")
def stock_server() -> Iterator[LiveServer]:
    """The same server without the two flags."""
    with LiveServer(connector=False) as server:
        yield server


@pytest.fixture(scope="session")
def small_server() -> Iterator[LiveServer]:
    """Ours with a pool that a few prompts fill, and everything else that differs.

    The connector is loaded by its module, and the engine knows requests by the ids
    that their clients chose.
    """
    with LiveServer(
        num_blocks=SMALL_POOL,
        by_module_path=True,
        env={"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
    ) as server:
        yield server


@pytest.fixture(scope="session")
def tier_server() -> Iterator[LiveServer]:
    """Ours with a host tier, the default policy, and a pool of a few prompts."""
    with with_tier(config={"max_inflight_bytes": FEW_BLOCKS * BLOCK_BYTES}) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, every server of ours that it used must hold nothing.

    Servers are found by name: a fixture that gives one ends in ``server``. They are
    asked for here so that they outlive this check.
    """
    names = [name for name in request.fixturenames if name.endswith("server")]
    servers = [request.getfixturevalue(name) for name in names]
    yield
    for server in servers:
        if server.is_ours and server.is_running:
            leak_check(server)
