"""The checks can fail: stores that are wrong in one way each are caught."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryStore
from sam_connector.storage.conformance import BLOCK_CHECKS, check_backend
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, Outcome


class ShortensLives(MemoryStore):
    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        result = super().touch(keys, ttl_s=ttl_s, deadline=deadline)
        for key in keys:
            value = self._data.find(str(key))
            if value is not None:
                value.expire_at = self._data.now() + ttl_s
        return result


class ForgetsTheLast(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        super().put(entries[:-1], ttl_s=ttl_s, deadline=deadline)
        return BatchResult([Outcome.DONE] * len(entries))


class MixesUpOrder(MemoryStore):
    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        result = super().exists(keys, deadline=deadline)
        return BatchResult(sorted(result.outcomes, key=lambda o: o.value), result.error)


class LivesForEver(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return super().put(entries, ttl_s=max(ttl_s, 3_600), deadline=deadline)


class LookingIsUsing(MemoryStore):
    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return super().touch(keys, ttl_s=3_600, deadline=deadline)


class KnowsNoTenant(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        return super().get(
            [Entry(e.key._replace(tenant=""), e.buffers) for e in entries],
            deadline=deadline,
        )

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return super().put(
            [Entry(e.key._replace(tenant=""), e.buffers) for e in entries],
            ttl_s=ttl_s,
            deadline=deadline,
        )


class IgnoresDeadlines(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        return super().get(entries, deadline=time.monotonic() + 60)


class RaisesAfterClose(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        if self._is_closed:
            raise RuntimeError("closed")
        return super().get(entries, deadline=deadline)


WRONG = [
    ShortensLives,
    ForgetsTheLast,
    MixesUpOrder,
    LivesForEver,
    LookingIsUsing,
    KnowsNoTenant,
    IgnoresDeadlines,
    RaisesAfterClose,
]


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_store_that_is_wrong_is_caught(
    kind: Callable[[MemoryData], MemoryStore],
) -> None:
    data = MemoryData()
    with pytest.raises((AssertionError, RuntimeError)):
        check_backend(lambda: kind(data))


def test_every_check_has_a_name_of_its_own() -> None:
    names = [check.__name__ for check in BLOCK_CHECKS]
    assert len(set(names)) == len(names)
