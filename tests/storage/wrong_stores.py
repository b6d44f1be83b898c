"""Stores of blocks, each wrong in one way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryStore
from sam_connector.errors import StoreTimeout
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Capabilities, Entry, Outcome

_LONG_S = 3_600.0


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


class AsksOncePerName(MemoryStore):
    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return super().exists(list(dict.fromkeys(keys)), deadline=deadline)


class ReadsAnyLength(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        outcomes = []
        for entry in entries:
            value = self._data.find(str(entry.key))
            if value is not None:
                data = value.data[: entry.num_bytes].ljust(entry.num_bytes)
                entry.buffers[0][:] = data
            outcomes.append(Outcome.MISSING if value is None else Outcome.DONE)
        return BatchResult(outcomes)


class WritesPastTheEnd(MemoryStore):
    """A longer value spills over, although the outcome is right."""

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        result = super().get(entries, deadline=deadline)
        for entry in entries:
            memory = entry.buffers[-1].obj
            if isinstance(memory, bytearray) and len(memory) > entry.num_bytes:
                memory[2 * 150 + 100] = 0
        return result


class DeletesNothing(MemoryStore):
    @override
    def delete(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return self.exists(keys, deadline=deadline)


class KnowsNoTenant(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        return super().get(_without_tenants(entries), deadline=deadline)

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        same = _without_tenants(entries)
        return super().put(same, ttl_s=ttl_s, deadline=deadline)

    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        same = [key._replace(tenant="") for key in keys]
        return super().exists(same, deadline=deadline)


class RaisesOnNothing(MemoryStore):
    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        assert keys[0]
        return super().touch(keys, ttl_s=ttl_s, deadline=deadline)


class DropsTheRest(MemoryStore):
    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return super().touch(keys[:10_000], ttl_s=ttl_s, deadline=deadline)


class SaysItIsShared(MemoryStore):
    """Every client sees only what it wrote."""

    def __init__(self, data: MemoryData) -> None:
        super().__init__(MemoryData(now=data.now))

    @property
    @override
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, is_shared=True)


class SharesOneReply(MemoryStore):
    """What one thread was sent is taken by another."""

    _reply: bytes = b""

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        result = super().get(entries, deadline=deadline)
        for entry in entries:
            if len(entry.buffers) == 1:
                self._reply = bytes(entry.buffers[0])
                time.sleep(0.0005)
                entry.buffers[0][:] = self._reply.ljust(entry.num_bytes)[
                    : entry.num_bytes
                ]
        return result


class LivesForEver(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return super().put(entries, ttl_s=max(ttl_s, _LONG_S), deadline=deadline)


class CountsWholeSeconds(MemoryStore):
    """Down; and no time at all is for ever."""

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        whole_s = int(ttl_s) or _LONG_S
        return super().put(entries, ttl_s=whole_s, deadline=deadline)


class TakesAnyTime(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        ttl_s = ttl_s if ttl_s > 0 else 0.001
        return super().put(entries, ttl_s=ttl_s, deadline=deadline)


class TouchesNothing(MemoryStore):
    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        return self.exists(keys, deadline=deadline)


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


class CreatesByTouch(MemoryStore):
    @override
    def touch(
        self, keys: Sequence[StoreKey], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        result = super().touch(keys, ttl_s=ttl_s, deadline=deadline)
        entries = [Entry(key, [memoryview(bytes(100))]) for key in keys]
        self.put(entries, ttl_s=ttl_s, deadline=deadline)
        return result


class LookingIsUsing(MemoryStore):
    @override
    def exists(self, keys: Sequence[StoreKey], *, deadline: float) -> BatchResult:
        return super().touch(keys, ttl_s=_LONG_S, deadline=deadline)


class WritesShorterLives(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        self.delete([entry.key for entry in entries], deadline=deadline)
        return super().put(entries, ttl_s=ttl_s, deadline=deadline)


class WritesOnce(MemoryStore):
    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        there = self.exists([entry.key for entry in entries], deadline=deadline)
        new = [
            entry
            for entry, outcome in zip(entries, there.outcomes, strict=True)
            if outcome is not Outcome.DONE
        ]
        super().put(new, ttl_s=ttl_s, deadline=deadline)
        return BatchResult([Outcome.DONE] * len(entries))


class IgnoresDeadlines(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        return super().get(entries, deadline=time.monotonic() + 60)


class ReadsInTheBackground(MemoryStore):
    """What was given up arrives all the same."""

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        if deadline > time.monotonic() + 1:
            return super().get(entries, deadline=deadline)
        later = time.monotonic() + 60
        timer = threading.Timer(
            0.05, lambda: MemoryStore.get(self, entries, deadline=later)
        )
        timer.start()
        return BatchResult([Outcome.FAILED] * len(entries), StoreTimeout("too slow"))


class WritesInTheBackground(MemoryStore):
    """What was given up is read from the caller's memory later."""

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        if deadline > time.monotonic() + 1:
            return super().put(entries, ttl_s=ttl_s, deadline=deadline)
        later = time.monotonic() + 60
        timer = threading.Timer(
            0.05,
            lambda: MemoryStore.put(self, entries, ttl_s=ttl_s, deadline=later),
        )
        timer.start()
        return BatchResult([Outcome.FAILED] * len(entries), StoreTimeout("too slow"))


class GoesOnAfterClose(MemoryStore):
    @override
    def close(self) -> None:
        """Nothing."""


class RaisesAfterClose(MemoryStore):
    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        assert not self._is_closed
        return super().get(entries, deadline=deadline)


class ClosesWhatItNeverOpened(MemoryStore):
    _was_used = False

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        self._was_used = True
        return super().put(entries, ttl_s=ttl_s, deadline=deadline)

    @override
    def close(self) -> None:
        assert self._was_used
        super().close()


def _without_tenants(entries: Sequence[Entry]) -> list[Entry]:
    return [Entry(e.key._replace(tenant=""), e.buffers) for e in entries]


#: Each with the check that must notice.
WRONG: list[tuple[type[MemoryStore], str]] = [
    (ForgetsTheLast, "values_return_as_written"),
    (MixesUpOrder, "outcomes_are_in_order"),
    (AsksOncePerName, "a_name_may_occur_twice"),
    (ReadsAnyLength, "another_length_is_missing"),
    (WritesPastTheEnd, "another_length_is_missing"),
    (DeletesNothing, "deleted_values_are_gone"),
    (KnowsNoTenant, "names_never_collide"),
    (RaisesOnNothing, "empty_batches_are_empty"),
    (DropsTheRest, "batches_may_be_large"),
    (SaysItIsShared, "shared_values_are_seen_by_others"),
    (SharesOneReply, "threads_never_get_each_others_values"),
    (LivesForEver, "values_live_as_long_as_asked"),
    (CountsWholeSeconds, "fractions_of_a_second_count"),
    (TakesAnyTime, "a_time_to_live_is_more_than_nothing"),
    (TouchesNothing, "touch_lengthens_lives"),
    (ShortensLives, "touch_never_shortens_lives"),
    (CreatesByTouch, "touch_creates_nothing"),
    (LookingIsUsing, "exists_changes_no_life"),
    (WritesShorterLives, "writing_again_never_shortens_lives"),
    (WritesOnce, "writing_again_lengthens_lives"),
    (IgnoresDeadlines, "a_deadline_in_the_past_fails"),
    (ReadsInTheBackground, "buffers_are_left_alone_after_get"),
    (WritesInTheBackground, "buffers_are_not_read_after_put"),
    (GoesOnAfterClose, "close_ends_it"),
    (RaisesAfterClose, "close_ends_it"),
    (ClosesWhatItNeverOpened, "close_of_one_never_used"),
]
