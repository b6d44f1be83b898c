"""Checks of how long values live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing

from sam_connector.storage.conformance.bench import (
    DONE,
    LONG_S,
    MISSING,
    PAST_SHORT_S,
    SHORT_S,
    Sleep,
    expect,
    expect_there,
    fill,
    new_keys,
    soon,
    source,
)
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import StoreBackend

OpenBlocks = Callable[[], StoreBackend]


def values_live_as_long_as_asked(open: OpenBlocks, sleep: Sleep) -> None:
    """No shorter; and, if that is declared, no longer."""
    with closing(open()) as store:
        short, long = new_keys(2)
        fill(store, [short], SHORT_S)
        fill(store, [long], 4 * PAST_SHORT_S)
        sleep(PAST_SHORT_S)
        ends = store.capabilities.exact_ttl
        expect_there(store, [short, long], [not ends, True], f"{PAST_SHORT_S} s later")
        if ends:
            result = store.touch([short, long], ttl_s=LONG_S, deadline=soon())
            expect(result, [MISSING, DONE], "touch of a value whose time is over")


def fractions_of_a_second_count(open: OpenBlocks, sleep: Sleep) -> None:
    """They become neither nothing nor forever."""
    with closing(open()) as store:
        tiny, small, more = new_keys(3)
        fill(store, [tiny], 0.0001)
        fill(store, [small], 0.3)
        fill(store, [more], PAST_SHORT_S + 0.9)
        sleep(PAST_SHORT_S)
        gone = not store.capabilities.exact_ttl
        expect_there(
            store, [tiny, small, more], [gone, gone, True], "0.1 ms, 0.3 s and 1.9 s"
        )


def a_time_to_live_is_more_than_nothing(open: OpenBlocks, sleep: Sleep) -> None:
    """``ValueError`` otherwise: the caller is wrong, not the store."""
    with closing(open()) as store:
        keys = new_keys(1)
        for ttl_s in (0.0, -1.0, math.nan):
            _expect_value_error(
                lambda ttl_s=ttl_s: store.put(  # type: ignore[misc]
                    [source(keys[0])], ttl_s=ttl_s, deadline=soon()
                ),
                f"put for {ttl_s} s",
            )
            _expect_value_error(
                lambda ttl_s=ttl_s: store.touch(  # type: ignore[misc]
                    keys, ttl_s=ttl_s, deadline=soon()
                ),
                f"touch for {ttl_s} s",
            )
        expect_there(store, keys, [False], "after values that live for no time")


def touch_lengthens_lives(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        if not (store.capabilities.touch and store.capabilities.exact_ttl):
            return
        touched, other = new_keys(2)
        fill(store, [touched, other], SHORT_S)
        _touch(store, [touched], LONG_S)
        sleep(PAST_SHORT_S)
        expect_there(store, [touched, other], [True, False], "the first was touched")


def touch_never_shortens_lives(open: OpenBlocks, sleep: Sleep) -> None:
    """Another instance may want it for longer."""
    with closing(open()) as store:
        keys = new_keys(2)
        fill(store, keys, LONG_S)
        _touch(store, keys, SHORT_S)
        sleep(PAST_SHORT_S)
        expect_there(store, keys, [True, True], f"touched for {SHORT_S} s")


def touch_creates_nothing(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        keys = new_keys(2)
        for _ in range(2):
            result = store.touch(keys, ttl_s=LONG_S, deadline=soon())
            expect(result, [MISSING] * 2, "touch of what is not there")
        expect_there(store, keys, [False, False], "touched, but never written")


def exists_changes_no_life(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        if not store.capabilities.exact_ttl:
            return
        keys = new_keys(1)
        fill(store, keys, SHORT_S)
        for _ in range(4):
            store.exists(keys, deadline=soon())
            sleep(PAST_SHORT_S / 4)
        expect_there(store, keys, [False], "exists was asked until its time was over")


def writing_again_never_shortens_lives(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        keys = new_keys(1)
        fill(store, keys, LONG_S)
        fill(store, keys, SHORT_S)
        sleep(PAST_SHORT_S)
        expect_there(store, keys, [True], f"written again for {SHORT_S} s")


def writing_again_lengthens_lives(open: OpenBlocks, sleep: Sleep) -> None:
    with closing(open()) as store:
        keys = new_keys(1)
        fill(store, keys, SHORT_S)
        fill(store, keys, LONG_S)
        sleep(PAST_SHORT_S)
        expect_there(store, keys, [True], f"written again for {LONG_S} s")


def _touch(store: StoreBackend, keys: Sequence[StoreKey], ttl_s: float) -> None:
    result = store.touch(keys, ttl_s=ttl_s, deadline=soon())
    expect(result, [DONE] * len(keys), "touch")


def _expect_value_error(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except ValueError:
        return
    raise AssertionError(f"{what} raised no ValueError")


CHECKS = (
    values_live_as_long_as_asked,
    fractions_of_a_second_count,
    a_time_to_live_is_more_than_nothing,
    touch_lengthens_lives,
    touch_never_shortens_lives,
    touch_creates_nothing,
    exists_changes_no_life,
    writing_again_never_shortens_lives,
    writing_again_lengthens_lives,
)
