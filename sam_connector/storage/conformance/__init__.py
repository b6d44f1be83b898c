"""Proof that a store keeps the contract of ``storage.port``.

    from sam_connector.storage.conformance import check_backend, check_manifests
    check_backend(lambda: MyStore("myhost"))

or, with pytest, one test for each rule:

    @pytest.mark.parametrize("check", BLOCK_CHECKS, ids=lambda c: c.__name__)
    def test_my_store(check):
        check(lambda: MyStore("myhost"), time.sleep)

A check raises ``AssertionError`` and says what was expected. It opens and closes
its own clients with ``open``, which must return another client of one and the same
store every time. The store need not be empty: the names are new in every check. It
needs room for 64 MiB, and must not evict meanwhile.

Values have at least one byte: those of this package begin with a header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sam_connector.storage.conformance.bench import Sleep
from sam_connector.storage.conformance.blocks import CHECKS as _VALUES
from sam_connector.storage.conformance.blocks import OpenBlocks
from sam_connector.storage.conformance.failures import CHECKS as _FAILURES
from sam_connector.storage.conformance.lifetimes import CHECKS as _LIFETIMES
from sam_connector.storage.conformance.manifests import CHECKS as MANIFEST_CHECKS
from sam_connector.storage.conformance.manifests import OpenManifests

__all__ = [
    "BLOCK_CHECKS",
    "MANIFEST_CHECKS",
    "check_backend",
    "check_manifests",
]

#: Each is called with ``open`` and ``sleep``; named for the rule it checks.
BLOCK_CHECKS: Sequence[Callable[[OpenBlocks, Sleep], None]] = (
    *_VALUES,
    *_LIFETIMES,
    *_FAILURES,
)


def check_backend(open: OpenBlocks, *, sleep: Sleep = time.sleep) -> None:
    """Checks a store of blocks.

    Args:
        open: returns another client of the store.
        sleep: lets the store's time go on, in seconds, for one with its own clock.

    Raises:
        AssertionError: it breaks the contract.
    """
    for check in BLOCK_CHECKS:
        check(open, sleep)


def check_manifests(open: OpenManifests, *, sleep: Sleep = time.sleep) -> None:
    """Checks a store of manifests; see ``check_backend``."""
    for check in MANIFEST_CHECKS:
        check(open, sleep)
