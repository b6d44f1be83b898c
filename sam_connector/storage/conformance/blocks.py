"""Checks of values: what is written is what is read, under its name alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from sam_connector.core.types import BlockHash, GroupId
from sam_connector.storage.conformance.bench import (
    DONE,
    LONG_S,
    MISSING,
    Sleep,
    expect,
    expect_content,
    expect_there,
    fill,
    new_keys,
    soon,
    source,
    target,
)
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import Entry, StoreBackend

OpenBlocks = Callable[[], StoreBackend]

_SIZES = (1, 100, 512 << 10, 3 << 20)
_MANY = 20_000
_ODD = 65_537


def values_return_as_written(open: OpenBlocks, sleep: Sleep) -> None:
    """Of every size, from read-only memory, one buffer or many."""
    with closing(open()) as store:
        sizes = [s for s in _SIZES if s <= store.capabilities.max_value_bytes]
        keys = new_keys(len(sizes))
        pairs = list(zip(keys, sizes, strict=True))
        result = store.put(
            [_cut(source(*pair)) for pair in pairs], ttl_s=LONG_S, deadline=soon()
        )
        expect(result, [DONE] * len(keys), "put")
        for cut in (_cut, _whole):
            entries = [cut(target(*pair)) for pair in reversed(pairs)]
            expect(store.get(entries, deadline=soon()), [DONE] * len(keys), "get")
            for entry in entries:
                expect_content(entry, f"{entry.num_bytes} bytes")


def outcomes_are_in_order(open: OpenBlocks, sleep: Sleep) -> None:
    """Every third value of a batch is there, and all calls say which."""
    with closing(open()) as store:
        keys = new_keys(50)
        there = [index % 3 == 0 for index in range(len(keys))]
        outcomes = [DONE if is_there else MISSING for is_there in there]
        fill(store, keys[::3])
        expect_there(store, keys, there, "a third was written")
        result = store.touch(keys, ttl_s=LONG_S, deadline=soon())
        expect(result, outcomes, "touch")
        if store.capabilities.delete:
            expect(store.delete(keys, deadline=soon()), outcomes, "delete")


def a_name_may_occur_twice(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        keys = new_keys(2)
        twice = [*keys, *keys]
        fill(store, twice)
        expect_there(store, twice, [True] * 4, "each written twice in one batch")


def another_length_is_missing(open: OpenBlocks, sleep: Sleep) -> None:
    """Longer, shorter; its neighbours in memory and in the batch are unharmed."""
    with closing(open()) as store:
        keys = new_keys(6)
        fill(store, keys)
        asked = [100, 99, 100, 101, 100, 1]
        memory = bytearray(b"\xa5" * 1_000)
        entries = [
            Entry(key, [memoryview(memory)[150 * n : 150 * n + size]])
            for n, (key, size) in enumerate(zip(keys, asked, strict=True))
        ]
        outcomes = [DONE if size == 100 else MISSING for size in asked]
        expect(store.get(entries, deadline=soon()), outcomes, "get of other lengths")
        for n, size in enumerate(asked):
            if size == 100:
                expect_content(entries[n], "beside one of another length")
            after = memory[150 * n + size : 150 * (n + 1)]
            assert after == b"\xa5" * len(after), "get wrote past the end of a buffer"
        expect_there(store, keys, [True] * 6, "after others were asked for")


def deleted_values_are_gone(open: OpenBlocks, sleep: Sleep) -> None:
    """And no others; without the capability nothing happens."""
    with closing(open()) as store:
        keys = new_keys(4)
        fill(store, keys)
        deletes = store.capabilities.delete
        outcome = DONE if deletes else MISSING
        expect(store.delete(keys[1:3], deadline=soon()), [outcome] * 2, "delete")
        there = [True, not deletes, not deletes, True]
        expect_there(store, keys, there, "after two were deleted")
        expect(store.delete(keys[1:3], deadline=soon()), [MISSING] * 2, "delete again")


def names_never_collide(open: OpenBlocks, sleep: Sleep) -> None:
    """Names that differ in one part, or could be mistaken for each other."""
    with closing(open()) as store:
        keys = list(_variants(new_keys(1)[0]))
        for key in keys:
            fill(store, [key])
        expect_there(store, keys, [True] * len(keys), "all written")
        if not store.capabilities.delete:
            return
        for count, key in enumerate(keys, start=1):
            expect(store.delete([key], deadline=soon()), [DONE], f"delete of {key}")
            there = [False] * count + [True] * (len(keys) - count)
            expect_there(store, keys, there, f"{count} deleted")


def empty_batches_are_empty(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        results = [
            store.put([], ttl_s=LONG_S, deadline=soon()),
            store.get([], deadline=soon()),
            store.exists([], deadline=soon()),
            store.touch([], ttl_s=LONG_S, deadline=soon()),
            store.delete([], deadline=soon()),
        ]
        for result in results:
            expect(result, [], "an empty batch")


def batches_may_be_large(open: OpenBlocks, sleep: Sleep) -> None:
    """300 values among 20,000 names."""
    with closing(open()) as store:
        keys = new_keys(_MANY)
        written = set(keys[:: _MANY // 300][:300])
        fill(store, sorted(written))
        outcomes = [DONE if key in written else MISSING for key in keys]
        expect(store.exists(keys, deadline=soon()), outcomes, "exists of many")
        touched = store.touch(keys, ttl_s=LONG_S, deadline=soon())
        expect(touched, outcomes, "touch of many")
        if store.capabilities.delete:
            expect(store.delete(keys, deadline=soon()), outcomes, "delete of many")
        gone = [MISSING] * _MANY if store.capabilities.delete else outcomes
        expect(store.exists(keys, deadline=soon()), gone, "exists of many, deleted")


def shared_values_are_seen_by_others(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store, closing(open()) as other:
        if not store.capabilities.is_shared:
            return
        keys = new_keys(2)
        fill(store, keys[:1])
        expect_there(other, keys, [True, False], "written by another client")
        fill(other, keys[1:])
        expect_there(store, keys, [True, True], "written by another client")


def threads_never_get_each_others_values(open: OpenBlocks, sleep: Sleep) -> None:
    """Eight threads on one client; each value belongs to one name."""
    keys = new_keys(8 * 6)
    sizes = {key: 1 + (n * 7_919) % 40_000 for n, key in enumerate(keys)}

    def work(worker: int) -> None:
        mine = keys[worker::8]
        for turn in range(12):
            expect(
                store.put(
                    [source(key, sizes[key]) for key in mine],
                    ttl_s=LONG_S,
                    deadline=soon(),
                ),
                [DONE] * len(mine),
                "put by one of several threads",
            )
            start = turn * 5 % len(keys)
            _read(store, [*mine, *keys[start : start + 5]], sizes, len(mine))

    with closing(open()) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def _read(
    store: StoreBackend,
    keys: Sequence[StoreKey],
    sizes: dict[StoreKey, int],
    num_written: int,
) -> None:
    entries = [target(key, sizes[key]) for key in keys]
    outcomes = store.get(entries, deadline=soon()).outcomes
    for index, (entry, outcome) in enumerate(zip(entries, outcomes, strict=True)):
        assert outcome is DONE or (index >= num_written and outcome is MISSING), (
            f"get by one of several threads: {outcome}"
        )
        if outcome is DONE:
            expect_content(entry, "with several threads")


def _variants(key: StoreKey) -> Iterator[StoreKey]:
    yield key
    for tenant in ("tenant2", "tenant:", "tenant%3A", "", "te nant", "tenänt"):
        yield key._replace(tenant=tenant)
    yield key._replace(fingerprint=key.fingerprint[:-1])
    yield key._replace(group_id=GroupId(1))
    yield key._replace(rank=1)
    yield key._replace(rank=11)
    yield key._replace(part=1)
    yield key._replace(rank=1, part=1)
    yield key._replace(block_hash=BlockHash(key.block_hash + b"\0"))
    yield key._replace(block_hash=BlockHash(b"\xff" * 32))


def _cut(entry: Entry) -> Entry:
    """The same memory in several buffers of odd lengths."""
    [buffer] = entry.buffers
    starts = [0, 1, 8, *range(_ODD, len(buffer), _ODD)]
    ends = [*starts[1:], len(buffer)]
    cuts = [buffer[a:b] for a, b in zip(starts, ends, strict=True) if a < len(buffer)]
    return Entry(entry.key, cuts)


def _whole(entry: Entry) -> Entry:
    return entry


CHECKS = (
    values_return_as_written,
    outcomes_are_in_order,
    a_name_may_occur_twice,
    another_length_is_missing,
    deleted_values_are_gone,
    names_never_collide,
    empty_batches_are_empty,
    batches_may_be_large,
    shared_values_are_seen_by_others,
    threads_never_get_each_others_values,
)
