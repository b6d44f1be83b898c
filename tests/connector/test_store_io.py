"""One rank's threads between its slots and a store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from typing_extensions import override

from sam_backends.memory import MemoryData, MemoryStore
from sam_connector.connector.metadata import (
    StoreDirection,
    StoreJob,
    StoreResult,
    StoreValue,
)
from sam_connector.connector.store_io import StoreIo
from sam_connector.core.types import BlockHash, GroupId
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, Outcome

SLOT_BYTES = 64
RECORD_BYTES = 48
F = "ab" * 16


class Slots:
    def __init__(self, num_slots: int) -> None:
        self.bytes = bytearray(num_slots * SLOT_BYTES)

    def slot(self, index: int) -> memoryview:
        return memoryview(self.bytes)[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]

    def fill(self, index: int, letter: str) -> None:
        self.slot(index)[:] = letter.encode() * SLOT_BYTES

    def letters(self, *indexes: int) -> str:
        return "".join(chr(self.slot(index)[0]) for index in indexes)


class Bench:
    def __init__(self, store: MemoryStore | None = None) -> None:
        self.data = MemoryData()
        self.store = store or MemoryStore(self.data)
        self.slots = Slots(8)
        self.io = StoreIo(
            self.store,
            self.slots,
            {0: RECORD_BYTES},
            rank=1,
            num_threads=2,
            timeout_s=5.0,
            ttl_s=60.0,
        )
        self._ids = iter(range(100))

    def run(
        self, direction: StoreDirection, *values: StoreValue, **more: Any
    ) -> StoreResult:
        fields: dict[str, Any] = {
            "job_id": next(self._ids),
            "direction": direction,
            "urgency": 0,
            "fingerprint": F,
            "tenant": "",
            "num_parts": 1,
            "values": values,
        }
        self.io.submit(StoreJob(**(fields | more)))
        return self.result()

    def result(self) -> StoreResult:
        deadline = time.monotonic() + 10
        while not (results := self.io.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        [result] = results
        return result

    def write(self, *values: StoreValue, **more: Any) -> StoreResult:
        return self.run(StoreDirection.WRITE, *values, **more)

    def read(self, *values: StoreValue, **more: Any) -> StoreResult:
        return self.run(StoreDirection.READ, *values, **more)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.io.close()
    assert made.io.is_stopped


def value(letter: str, *slots: int) -> StoreValue:
    return StoreValue(0, letter.encode() * 32, slots)


def key(letter: str, part: int = 0) -> StoreKey:
    return StoreKey("", F, GroupId(0), 1, BlockHash(letter.encode() * 32), part)


def soon() -> float:
    return time.monotonic() + 5


def test_slots_come_back_as_they_were(bench: Bench) -> None:
    for index, letter in enumerate("abc"):
        bench.slots.fill(index, letter)
    assert not bench.write(value("x", 0, 1), value("y", 2)).failed
    assert not bench.read(value("x", 5, 6), value("y", 7)).failed
    assert bench.slots.letters(5, 6, 7) == "abc"
    # What is behind a record in its slot is nobody's.
    assert bytes(bench.slots.slot(5)[RECORD_BYTES:]) == bytes(SLOT_BYTES - RECORD_BYTES)


def test_a_block_that_is_there_is_read_past(bench: Bench) -> None:
    bench.slots.fill(0, "a")
    bench.slots.fill(1, "b")
    bench.write(value("x", 0, 1))
    assert not bench.read(value("x", -1, 6)).failed
    assert bench.slots.letters(6) == "b"


def test_what_is_not_there_is_missing_and_the_rest_is_read(bench: Bench) -> None:
    bench.slots.fill(0, "a")
    bench.write(value("x", 0))
    result = bench.read(value("n", 4), value("x", 5))
    assert result.failed == result.missing == {0}
    assert bench.slots.letters(5) == "a"
    assert result.rank == 1


def test_blocks_that_are_cut_are_put_together(bench: Bench) -> None:
    bench.slots.slot(0)[:RECORD_BYTES] = bytes(range(RECORD_BYTES))
    bench.write(value("x", 0), num_parts=5)
    there = bench.store.exists([key("x", part) for part in range(6)], deadline=soon())
    assert there.outcomes == [Outcome.DONE] * 5 + [Outcome.MISSING]
    assert not bench.read(value("x", 4), num_parts=5).failed
    assert bytes(bench.slots.slot(4)[:RECORD_BYTES]) == bytes(range(RECORD_BYTES))
    bench.store.delete([key("x", 3)], deadline=soon())
    assert bench.read(value("x", 4), num_parts=5).missing == {0}


def test_what_another_has_written_is_not_sent_again(bench: Bench) -> None:
    bench.slots.fill(0, "a")
    bench.write(value("x", 0))
    bench.slots.fill(0, "b")  # other bytes, to tell whether they are sent
    bench.write(value("x", 0))
    bench.read(value("x", 4))
    assert bench.slots.letters(4) == "a"


def damage(bench: Bench, how: str) -> None:
    stored = bench.data.find(str(key("x")))
    assert stored is not None
    data = bytearray(stored.data)
    if how == "a byte of the content":
        data[-1] ^= 1
    elif how == "a byte of the header":
        data[8] ^= 1
    elif how == "its length":
        data = data[:-1]
    else:
        data = bytearray(len(data))
    stored.data = bytes(data)


@pytest.mark.parametrize(
    "how", ["a byte of the content", "a byte of the header", "its length", "all of it"]
)
def test_a_damaged_value_is_missing(bench: Bench, how: str) -> None:
    bench.slots.fill(0, "a")
    bench.write(value("x", 0))
    damage(bench, how)
    result = bench.read(value("x", 4))
    assert result.failed == result.missing == {0}
    # Else it would be refreshed for ever and never written anew.
    gone = bench.store.exists([key("x")], deadline=soon())
    assert gone.outcomes == [Outcome.MISSING]


def test_h10_another_model_s_value_is_none_of_ours(bench: Bench) -> None:
    bench.slots.fill(0, "a")
    bench.write(value("x", 0), fingerprint="cd" * 16)
    assert bench.read(value("x", 4)).missing == {0}


class Unreliable(MemoryStore):
    def __init__(self) -> None:
        super().__init__(MemoryData())
        self.raises = False
        self.is_full = False

    @override
    def get(self, entries: Sequence[Entry], *, deadline: float) -> BatchResult:
        if self.raises:
            raise RuntimeError("a backend that breaks its contract")
        return super().get(entries, deadline=deadline)

    @override
    def put(
        self, entries: Sequence[Entry], *, ttl_s: float, deadline: float
    ) -> BatchResult:
        if self.is_full:
            return BatchResult([Outcome.FULL] * len(entries))
        return super().put(entries, ttl_s=ttl_s, deadline=deadline)


def test_d03_a_backend_that_raises_costs_its_job_and_no_thread() -> None:
    store = Unreliable()
    bench = Bench(store)
    store.raises = True
    for _ in range(4):
        result = bench.read(value("x", 4))
        assert result.failed == {0}
        assert not result.missing
        assert result.error is not None
        assert "contract" in result.error
    store.raises = False
    bench.slots.fill(0, "a")
    bench.write(value("x", 0))
    assert not bench.read(value("x", 4)).failed
    bench.io.close()


def test_d15_a_store_that_is_full_has_not_got_it() -> None:
    store = Unreliable()
    bench = Bench(store)
    store.is_full = True
    assert bench.write(value("x", 0)).failed == {0}
    bench.io.close()


def test_loads_overtake_what_is_less_urgent() -> None:
    bench = Bench()
    bench.io.close()
    # With the threads gone, what is queued says in which order it would be done.
    for urgency in (2, 1, 0, 2, 0):
        bench.io.submit(
            StoreJob(
                job_id=urgency,
                direction=StoreDirection.READ,
                urgency=urgency,
                fingerprint=F,
                tenant="",
                num_parts=1,
                values=(),
            )
        )
    queued = [bench.io._queue.get_nowait()[0] for _ in range(5)]
    assert queued == [0, 0, 1, 2, 2]


def test_at_the_end_what_waits_is_reported_as_failed() -> None:
    bench = Bench()
    bench.io._is_closed.set()
    assert bench.read(value("x", 4)).error == "the engine ends"
    bench.io.close()
