"""What the checks share: names, bytes, deadlines and comparisons."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence

from sam_connector.core.types import BlockHash, GroupId
from sam_connector.storage.key import StoreKey
from sam_connector.storage.port import BatchResult, Entry, Outcome, StoreBackend

Sleep = Callable[[float], None]

#: Longer than any check takes.
LONG_S = 300.0
#: Lives that a check sees end, and how long it then waits to be sure.
SHORT_S = 0.5
PAST_SHORT_S = 1.0

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED


def soon() -> float:
    """A deadline that a store in order never misses."""
    return time.monotonic() + 30.0


def new_fingerprint() -> str:
    return secrets.token_hex(16)


def new_keys(count: int) -> list[StoreKey]:
    """Names that nobody has used."""
    fingerprint = new_fingerprint()
    return [
        StoreKey("tenant", fingerprint, GroupId(0), 0, BlockHash(n.to_bytes(32, "big")))
        for n in range(count)
    ]


def content(key: StoreKey, num_bytes: int) -> bytes:
    """Bytes that belong to a name and to no other."""
    return random.Random(str(key)).randbytes(num_bytes)


def source(key: StoreKey, num_bytes: int = 100) -> Entry:
    """The value of a name, in read-only memory."""
    return Entry(key, [memoryview(content(key, num_bytes))])


def target(key: StoreKey, num_bytes: int = 100) -> Entry:
    """Room for the value of a name."""
    return Entry(key, [memoryview(bytearray(num_bytes))])


def fill(store: StoreBackend, keys: Sequence[StoreKey], ttl_s: float = LONG_S) -> None:
    """Writes the values of names."""
    result = store.put([source(key) for key in keys], ttl_s=ttl_s, deadline=soon())
    expect(result, [DONE] * len(keys), "put")


def expect(result: BatchResult, outcomes: Sequence[Outcome], call: str) -> None:
    """Compares outcomes, one by one."""
    found = list(result.outcomes)
    assert len(found) == len(outcomes), (
        f"{call} of {len(outcomes)} returned {len(found)} outcomes"
    )
    for index, (got, wanted) in enumerate(zip(found, outcomes, strict=True)):
        assert got is wanted, (
            f"{call}: {got} at {index} of {len(found)}, not {wanted}; {result.error!r}"
        )


def expect_failed(result: BatchResult, count: int, call: str) -> None:
    """All have failed, and it says why."""
    expect(result, [FAILED] * count, call)
    if count:
        assert result.error is not None, f"{call} failed and does not say why"


def expect_there(
    store: StoreBackend, keys: Sequence[StoreKey], there: Sequence[bool], why: str
) -> None:
    """Compares what is there, as ``exists`` says and as ``get`` does."""
    outcomes = [DONE if is_there else MISSING for is_there in there]
    expect(store.exists(keys, deadline=soon()), outcomes, f"exists, {why}")
    entries = [target(key) for key in keys]
    expect(store.get(entries, deadline=soon()), outcomes, f"get, {why}")
    for entry, is_there in zip(entries, there, strict=True):
        if is_there:
            expect_content(entry, why)


def expect_content(entry: Entry, why: str) -> None:
    """What was read is what belongs to the name."""
    assert b"".join(entry.buffers) == content(entry.key, entry.num_bytes), (
        f"{entry.key} has other bytes than were written, {why}"
    )
