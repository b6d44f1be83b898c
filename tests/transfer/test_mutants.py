"""Each guard of the engine for CPUs is needed: without it a test of it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from sam_connector.transfer import cpu_engine
from sam_connector.transfer.contract import Direction
from sam_connector.transfer.cpu_engine import CpuCopyEngine
from sam_connector.transfer.lanes import Lanes
from sam_connector.transfer.planner import CopyPlanner
from tests.transfer.test_cpu_engine import TestCpuEngineWithAFullQueue


def _lanes_forget_order(patch: pytest.MonkeyPatch) -> None:
    def may_run(self: Lanes, direction: Direction) -> bool:
        return bool(self._waiting[direction])

    patch.setattr(Lanes, "_may_run", may_run)


def _blocks_order_nothing(patch: pytest.MonkeyPatch) -> None:
    real = CopyPlanner._enter

    def enter(self: CopyPlanner, direction: Direction, *ids: Any) -> int:
        for last in self._last_on_block.values():
            last[:] = 0
        return real(self, direction, *ids)

    patch.setattr(CopyPlanner, "_enter", enter)


def _close_forgets_the_queue(patch: pytest.MonkeyPatch) -> None:
    def run(self: CpuCopyEngine) -> None:
        lanes = Lanes()
        while not self._is_closed:
            self._take_in(lanes)
            if lanes:
                self._execute(lanes.pop())

    patch.setattr(CpuCopyEngine, "_run", run)


def _shares_are_lost(patch: pytest.MonkeyPatch) -> None:
    real = cpu_engine.split_by_bytes
    patch.setattr(
        cpu_engine,
        "split_by_bytes",
        lambda *args, **kwargs: real(*args, **kwargs)[:1],
    )


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (_lanes_forget_order, "test_a_load_sees_an_earlier_store_to_its_slot"),
    (_lanes_forget_order, "test_a_store_does_not_overtake_an_earlier_load"),
    (_blocks_order_nothing, "test_a_store_sees_an_earlier_load_of_its_block"),
    (
        _blocks_order_nothing,
        "test_a_load_does_not_disturb_an_earlier_store_of_its_block",
    ),
    (_close_forgets_the_queue, "test_close_ends_every_job_one_way_or_the_other"),
    (_shares_are_lost, "test_large_blocks"),
]


@pytest.mark.parametrize(("mutant", "name"), MUTANTS)
def test_without_its_guard_the_test_fails(
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
    name: str,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(TestCpuEngineWithAFullQueue(), name)()
