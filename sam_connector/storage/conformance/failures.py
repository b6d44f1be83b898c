"""Checks of what happens when a call gives up, or the store is closed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

from sam_connector.storage.conformance.bench import (
    DONE,
    LONG_S,
    Sleep,
    content,
    expect,
    expect_content,
    expect_failed,
    expect_there,
    fill,
    new_keys,
    soon,
    source,
    target,
)
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, StoreBackend

OpenBlocks = Callable[[], StoreBackend]

#: From hopeless to almost enough for what ``_NUM_LARGE`` values need.
_TIMEOUTS_S = (0.0, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01)
_NUM_LARGE = 8
_LARGE = 512 << 10
#: For whoever still writes after it has given up.
_LINGER_S = 0.2
_MARK = b"\xa5"


def a_deadline_in_the_past_fails(open: OpenBlocks, sleep: Sleep) -> None:
    """At once, with a reason; afterwards the store can be used as before."""
    with closing(open()) as store:
        keys = new_keys(3)
        fill(store, keys)
        start = time.monotonic()
        for name, result in _all_calls(store, keys, start - 1.0):
            expect_failed(result, len(keys), f"{name} with a deadline in the past")
        duration_s = time.monotonic() - start
        assert duration_s < 5, f"five calls that were too late took {duration_s:.1f} s"
        expect_there(store, keys, [True] * 3, "after calls that were too late")


def buffers_are_left_alone_after_get(open: OpenBlocks, sleep: Sleep) -> None:
    """Whatever a get that gave up had asked for must not arrive later."""
    with closing(open()) as store:
        keys = new_keys(_NUM_LARGE)
        _fill_large(store, keys)
        memory = bytearray(_NUM_LARGE * _LARGE)
        entries = _entries(keys, memory)
        for timeout_s in _TIMEOUTS_S:
            result = store.get(entries, deadline=time.monotonic() + timeout_s)
            _expect_done_content(entries, result)
            memory[:] = _MARK * len(memory)
            time.sleep(_LINGER_S)
            assert memory == _MARK * len(memory), (
                f"get with {timeout_s} s wrote to its buffers after it had returned"
            )
        result = store.get(entries, deadline=soon())
        expect(result, [DONE] * len(keys), "get after some that gave up")
        _expect_done_content(entries, result)


def buffers_are_not_read_after_put(open: OpenBlocks, sleep: Sleep) -> None:
    """A put that gave up has written all of a value or nothing of it."""
    with closing(open()) as store:
        for timeout_s in _TIMEOUTS_S:
            keys = new_keys(_NUM_LARGE)
            memory = bytearray().join(content(key, _LARGE) for key in keys)
            entries = _entries(keys, memory)
            deadline = time.monotonic() + timeout_s
            put = store.put(entries, ttl_s=LONG_S, deadline=deadline)
            memory[:] = _MARK * len(memory)
            time.sleep(_LINGER_S)
            got = store.get(entries, deadline=soon())
            _expect_done_content(entries, got)
            for written, read in zip(put.outcomes, got.outcomes, strict=True):
                assert written is not DONE or read is DONE, "what was written is lost"
            if store.capabilities.delete:
                store.delete(keys, deadline=soon())


def close_ends_it(open: OpenBlocks, sleep: Sleep) -> None:
    """Twice does no harm, calls fail without raising, others go on."""
    keys = new_keys(2)
    with closing(open()) as other:
        store = open()
        fill(store, keys)
        store.close()
        store.close()
        for name, result in _all_calls(store, keys, soon()):
            expect_failed(result, len(keys), f"{name} after close")
        store.close()
        if other.capabilities.is_shared:
            expect_there(other, keys, [True, True], "after another client was closed")


def close_of_one_never_used(open: OpenBlocks, sleep: Sleep) -> None:
    open().close()


def _all_calls(
    store: StoreBackend, keys: list[StoreKey], deadline: float
) -> Iterator[tuple[str, BatchResult]]:
    sources = [source(key) for key in keys]
    targets = [target(key) for key in keys]
    yield "put", store.put(sources, ttl_s=LONG_S, deadline=deadline)
    yield "get", store.get(targets, deadline=deadline)
    yield "exists", store.exists(keys, deadline=deadline)
    yield "touch", store.touch(keys, ttl_s=LONG_S, deadline=deadline)
    yield "delete", store.delete(keys, deadline=deadline)


def _fill_large(store: StoreBackend, keys: list[StoreKey]) -> None:
    entries = [source(key, _LARGE) for key in keys]
    result = store.put(entries, ttl_s=LONG_S, deadline=soon())
    expect(result, [DONE] * len(keys), "put")


def _entries(keys: list[StoreKey], memory: bytearray) -> list[Entry]:
    """One value after another in ``memory``, each in two buffers."""
    view = memoryview(memory)
    slots = [view[n * _LARGE : (n + 1) * _LARGE] for n in range(len(keys))]
    return [
        Entry(key, [slot[:129], slot[129:]])
        for key, slot in zip(keys, slots, strict=True)
    ]


def _expect_done_content(entries: list[Entry], result: BatchResult) -> None:
    assert len(result.outcomes) == len(entries), "an outcome for each value is due"
    for entry, outcome in zip(entries, result.outcomes, strict=True):
        if outcome is DONE:
            expect_content(entry, "some calls gave up")


CHECKS = (
    a_deadline_in_the_past_fails,
    buffers_are_left_alone_after_get,
    buffers_are_not_read_after_put,
    close_ends_it,
    close_of_one_never_used,
)
