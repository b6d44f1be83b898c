"""A recall of what a manifest says, however much that is."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sam_connector.connector.tier.recall import Recall
from sam_connector.connector.tier.session_directory import NoSessions
from sam_connector.connector.tier.values import ValueShape
from sam_connector.core.tiers import OperationHandle
from sam_connector.core.types import BlockHash, EditStatus
from sam_connector.pooling.manifest import Manifest, ManifestContext
from tests.connector.tier.bench import G0, Bench
from tests.pooling.bench import session

S = session("s")


def recall(*contexts: list[BlockHash]) -> tuple[Recall, Callable[[], None]]:
    """A recall of a session, and what answers it with a manifest of the contexts."""
    bench = Bench()
    bench.state.directory = NoSessions()
    told: list[Any] = []
    remote: Any = SimpleNamespace(
        shape=ValueShape({G0: 1}, {G0: 1}),
        sessions=SimpleNamespace(recall=lambda _, waiter: told.append(waiter)),
        read=lambda *_, **__: "the store has nothing",
        reading=set(),
    )
    bench.state.remote = remote
    manifest = Manifest(
        session=S,
        contexts=[ManifestContext({G0: hashes}) for hashes in contexts],
        block_sizes={G0: 16},
    )
    return Recall(bench.state, S, ()), lambda: told[0](manifest, None)


def run(operation: Recall) -> tuple[OperationHandle, int]:
    """Step by step; returns how many steps it took as well."""
    num_steps = 0
    while operation.has_more:
        num_steps += 1
        assert operation.advance(64, 64) <= 128
    return operation.end(), num_steps


def test_a_manifest_of_a_million_blocks_keeps_nobody_waiting() -> None:
    operation, answer = recall(
        [BlockHash(n.to_bytes(8, "big")) for n in range(1 << 20)]
    )
    begin = time.monotonic()
    answer()
    handle, _ = run(operation)
    assert time.monotonic() - begin < 1.0
    assert handle.status is EditStatus.REJECTED
    assert handle.blocks.missing == 1 << 20


def test_a_block_that_is_said_to_come_a_million_times_comes_once() -> None:
    operation, answer = recall(*[[BlockHash(b"the same")] * (1 << 14)] * 64)
    answer()
    handle, num_steps = run(operation)
    assert num_steps <= 64
    assert handle.blocks.requested == 1 << 20
