"""Versions of manifests, as others may have written them."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.pooling.events import Ended, Published
from sam_connector.storage.port import MAX_VERSION, WriteOutcome
from tests.pooling.pools import Pool, S, context, other_engines, stored


@pytest.mark.parametrize("version", [9_000_000, MAX_VERSION - 3])
def test_what_is_not_usable_is_outrun(version: int) -> None:
    with Pool() as pool:
        pool.manifests.put(S, version, other_engines(1, version=5))
        pool.publish(S, 1, 2)
        assert pool.event() == Published(S)
        found = stored(pool)
        assert found is not None
        assert found.contexts == [context(1, 2)]

        ticket = pool.spm.end(S)
        assert pool.event() == Ended(ticket, found=True)
        assert stored(pool) is None


def test_an_end_that_comes_too_late_is_tried_again_with_a_later_version() -> None:
    """A turn is written between the look at what is there and the tombstone."""
    with Pool() as pool:
        write = pool.manifests.write

        def interrupted(*args: Any, **more: Any) -> WriteOutcome:
            pool.manifests.write = write  # type: ignore[method-assign]
            pool.manifests.put(S, 9_000_000, other_engines(1, version=9_000_000))
            return write(*args, **more)

        pool.publish(S, 1)
        pool.event()
        pool.manifests.write = interrupted  # type: ignore[method-assign]
        ticket = pool.spm.end(S)
        assert pool.event() == Ended(ticket, found=True)
        assert stored(pool) is None


def test_an_end_that_nothing_can_outrun_says_so() -> None:
    with Pool() as pool:
        pool.manifests.put(S, MAX_VERSION, other_engines(1, version=MAX_VERSION))
        pool.spm.end(S)
        event = pool.event()
        assert isinstance(event, Ended)
        assert event.reason
