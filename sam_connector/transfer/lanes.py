"""Which planned job runs next: two directions that take turns, in order."""

from __future__ import annotations

from collections import deque

from sam_connector.transfer.contract import Direction
from sam_connector.transfer.planner import CopyPlan


class Lanes:
    """Planned jobs that wait, one queue per direction. Not thread-safe.

    Taking turns keeps a load that somebody waits for from standing behind every store
    that was queued before, and the other way round.
    """

    def __init__(self) -> None:
        self._waiting: dict[Direction, deque[CopyPlan]] = {
            direction: deque() for direction in Direction
        }
        self._turn = Direction.LOAD

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._waiting.values())

    def push(self, plan: CopyPlan) -> None:
        """Plans come in the order of their ``seq``."""
        self._waiting[plan.direction].append(plan)

    def pop(self) -> CopyPlan:
        """The next job; everything it has to follow was popped before.

        Raises:
            IndexError: nothing waits.
        """
        direction = self._turn if self._may_run(self._turn) else self._turn.opposite
        self._turn = direction.opposite
        return self._waiting[direction].popleft()

    def _may_run(self, direction: Direction) -> bool:
        # If the first of one lane must wait for the other, then the first of that
        # other one is older than everything here and waits for nothing.
        lane, others = self._waiting[direction], self._waiting[direction.opposite]
        if not lane:
            return False
        return not others or others[0].seq > lane[0].after
