from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.trace_replay.loop import ClosedLoop
from tests.benchmarks.trace_replay.rows import row, workload

pytestmark = pytest.mark.vllm


def test_a_lead_waits_for_its_children() -> None:
    load = workload(
        row("a", 0, 1, 100),
        row("a/1", 2, 3, 100, parent="a"),
        row("a/2", 2, 5, 100, parent="a"),
        row("a", 6, 7, 300),
    )
    loop = ClosedLoop(load)
    lead, first, second, again = load.turns
    assert loop.first() == [lead]
    assert loop.ended(lead) == [first, second]
    assert loop.ended(first) == []
    assert loop.ended(second) == [again]


def test_an_overlapping_call_follows_a_start() -> None:
    load = workload(row("a", 0, 9, 1_000), row("a", 1, 2, 100))
    loop = ClosedLoop(load)
    assert loop.started(load.turns[0]) == [load.turns[1]]
    assert loop.ended(load.turns[0]) == []
