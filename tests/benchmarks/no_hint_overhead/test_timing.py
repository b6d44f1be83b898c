from __future__ import annotations

import gc

import pytest

pytest.importorskip("vllm")

from benchmarks.no_hint_overhead.timing import Ratio, StepTimer, quiet_gc
from benchmarks.scheduler_harness import make_request, make_scheduler

pytestmark = pytest.mark.vllm


def test_calls_add_up() -> None:
    timer = StepTimer(make_scheduler(num_blocks=64))
    timer.add(make_request("a", range(40), max_tokens=2))
    added_ns = timer.total_ns
    timer.step()
    timer.call(lambda: None)
    assert len(timer.step_ns) == 2
    assert timer.total_ns == added_ns + sum(timer.step_ns)


def test_ratio_is_of_pairs_not_of_sums() -> None:
    ratio = Ratio.of([2.0, 20.0, 600.0], [1.0, 10.0, 100.0])
    assert ratio.median == 2.0
    assert ratio.low <= ratio.median <= ratio.high


def test_no_collection_inside_and_back_to_normal_after() -> None:
    with quiet_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
