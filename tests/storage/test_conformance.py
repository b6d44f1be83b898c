"""The checks can fail: a store that is wrong in one way is caught by its check."""

from __future__ import annotations

import pytest

from sam_backends.memory import MemoryData, MemoryManifests, MemoryStore
from sam_connector.core.clock import ManualClock
from sam_connector.storage.conformance import (
    BLOCK_CHECKS,
    MANIFEST_CHECKS,
    check_backend,
    check_manifests,
)
from tests.storage import wrong_manifests, wrong_stores

BLOCKS = {check.__name__: check for check in BLOCK_CHECKS}
MANIFESTS = {check.__name__: check for check in MANIFEST_CHECKS}

Blocks = type[MemoryStore]
Manifests = type[MemoryManifests]


class Bench:
    """Data, and a clock that passes as the checks want it to."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.data = MemoryData(now=self.clock.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_all_checks_pass_on_a_store_that_is_right(bench: Bench) -> None:
    """Also with a clock of its own."""
    check_backend(lambda: MemoryStore(bench.data), sleep=bench.clock.advance)
    check_manifests(lambda: MemoryManifests(bench.data), sleep=bench.clock.advance)


@pytest.mark.parametrize(("kind", "name"), wrong_stores.WRONG)
def test_a_wrong_store_is_caught(kind: Blocks, name: str, bench: Bench) -> None:
    with pytest.raises((AssertionError, IndexError)):
        BLOCKS[name](lambda: kind(bench.data), bench.clock.advance)


@pytest.mark.parametrize(("kind", "name"), wrong_manifests.WRONG)
def test_a_wrong_store_of_manifests_is_caught(
    kind: Manifests, name: str, bench: Bench
) -> None:
    with pytest.raises(AssertionError):
        MANIFESTS[name](lambda: kind(bench.data), bench.clock.advance)


def test_the_whole_suite_catches_what_a_check_does(bench: Bench) -> None:
    with pytest.raises(AssertionError):
        check_backend(
            lambda: wrong_stores.MixesUpOrder(bench.data), sleep=bench.clock.advance
        )
    with pytest.raises(AssertionError):
        check_manifests(
            lambda: wrong_manifests.TheLastWins(bench.data), sleep=bench.clock.advance
        )


def test_every_check_has_a_name_and_a_store_that_it_catches() -> None:
    assert len(BLOCKS) == len(BLOCK_CHECKS)
    assert len(MANIFESTS) == len(MANIFEST_CHECKS)
    assert {name for _, name in wrong_stores.WRONG} == set(BLOCKS)
    assert {name for _, name in wrong_manifests.WRONG} == set(MANIFESTS)
