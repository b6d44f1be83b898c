from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sam_connector.transfer.contract import Direction
from sam_connector.transfer.lanes import Lanes
from sam_connector.transfer.layout import Descriptors
from sam_connector.transfer.planner import CopyPlan


def _lanes(*plans: tuple[str, int]) -> Lanes:
    """Plans as (direction, what it comes after), numbered from 1."""
    lanes = Lanes()
    for seq, (direction, after) in enumerate(plans, 1):
        lanes.push(
            CopyPlan(
                job_id=seq,
                seq=seq,
                after=after,
                direction=Direction(direction),
                descriptors=Descriptors.concatenate([]),
            )
        )
    return lanes


def _order(lanes: Lanes) -> list[int]:
    return [lanes.pop().seq for _ in range(len(lanes))]


def test_directions_take_turns() -> None:
    lanes = _lanes(("store", 0), ("store", 0), ("store", 0), ("load", 0), ("load", 0))
    assert _order(lanes) == [4, 1, 5, 2, 3]


def test_one_direction_keeps_its_order() -> None:
    assert _order(_lanes(*[("load", 0)] * 4)) == [1, 2, 3, 4]


def test_a_job_waits_for_what_it_must_follow() -> None:
    lanes = _lanes(("store", 0), ("store", 0), ("load", 2), ("load", 0), ("store", 3))
    order = _order(lanes)
    assert order.index(2) < order.index(3)
    assert order.index(3) < order.index(5)
    assert sorted(order) == [1, 2, 3, 4, 5]


def test_jobs_that_wait_for_each_other_in_turn_do_not_block() -> None:
    lanes = _lanes(("load", 0), ("store", 1), ("load", 2), ("store", 3), ("load", 4))
    assert _order(lanes) == [1, 2, 3, 4, 5]


def test_what_is_over_needs_no_wait() -> None:
    lanes = _lanes(("store", 0), ("store", 0))
    assert _order(lanes) == [1, 2]
    lanes = _lanes(("store", 0), ("load", 1))
    assert _order(lanes) == [1, 2]


def test_nothing_waits_in_empty_lanes() -> None:
    lanes = Lanes()
    assert len(lanes) == 0
    with pytest.raises(IndexError):
        lanes.pop()
