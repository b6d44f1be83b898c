"""Which turns may start once others have started or ended."""

from __future__ import annotations

from benchmarks.trace_replay.workload import Turn, Workload


class ClosedLoop:
    """Follows the causes of a workload; each turn is handed out once."""

    def __init__(self, workload: Workload) -> None:
        self._first: list[Turn] = []
        self._num_awaited: dict[int, int] = {}
        self._after_end: dict[int, list[Turn]] = {}
        self._after_start: dict[int, list[Turn]] = {}
        for turn in workload.turns:
            if turn.follows_start_of is not None:
                self._after_start.setdefault(turn.follows_start_of, []).append(turn)
            elif turn.wait_for:
                self._num_awaited[turn.index] = len(turn.wait_for)
                for index in turn.wait_for:
                    self._after_end.setdefault(index, []).append(turn)
            else:
                self._first.append(turn)

    def first(self) -> list[Turn]:
        """Turns that wait for nobody."""
        return self._first

    def started(self, turn: Turn) -> list[Turn]:
        """Turns that waited for this one to start."""
        return self._after_start.pop(turn.index, [])

    def ended(self, turn: Turn) -> list[Turn]:
        """Turns that waited for this one to end, and for nobody else any more."""
        ready = []
        for follower in self._after_end.pop(turn.index, []):
            self._num_awaited[follower.index] -= 1
            if not self._num_awaited[follower.index]:
                ready.append(follower)
        return ready
