from __future__ import annotations

from benchmarks.trace_replay.link import HostLink
from sam_connector.transfer.contract import Direction


def test_one_direction_is_shared_and_the_other_is_free() -> None:
    link = HostLink(100.0)
    assert link.copy(Direction.LOAD, 200, 1.0) == 3.0
    assert link.copy(Direction.LOAD, 100, 1.5) == 4.0
    assert link.copy(Direction.STORE, 100, 1.5) == 2.5
    assert link.num_bytes == 400
    assert [link.num_busy(at_s) for at_s in (2.0, 3.0, 4.0)] == [2, 1, 0]


def test_a_copy_starts_no_earlier_than_it_may() -> None:
    link = HostLink(100.0)
    assert link.copy(Direction.LOAD, 100, 5.0) == 6.0
    assert link.copy(Direction.LOAD, 100, 9.0) == 10.0
