"""A hashed timer wheel: O(1) to register, refresh and remove.

The idea is scheme 6 of Varghese and Lauck, "Hashed and Hierarchical Timing
Wheels" (SOSP 1987). Expired keys are *returned*, not called back, so nothing can
re-enter the slot that is being drained.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

from sam_connector.errors import IntegrityError

K = TypeVar("K", bound=Hashable)


class TimerWheel(Generic[K]):
    """Deadlines of many keys, at a resolution of one tick.

    A key fires no earlier than its deadline and at most one tick late, measured
    at the first ``advance`` after it. Deadlines further away than the wheel's
    circumference stay in their slot for as many rounds as it takes.

    Args:
        num_slots: slots on the wheel.
        tick_s: seconds per slot.
        now: the present, monotonic seconds.
    """

    def __init__(
        self, *, num_slots: int = 3600, tick_s: float = 1.0, now: float = 0.0
    ) -> None:
        if num_slots < 1 or not tick_s > 0:
            raise ValueError(f"bad wheel: {num_slots} slots of {tick_s} s")
        self._tick_s = tick_s
        # Ordered, since taking the first keys of a large dict one by one is O(n) each.
        self._slots: list[OrderedDict[K, int]] = [
            OrderedDict() for _ in range(num_slots)
        ]
        self._tick_of: dict[K, int] = {}
        #: Last tick whose slot has been drained completely.
        self._cursor = math.floor(now / tick_s)
        #: Tick of the latest ``now``; ahead of the cursor if a limit was hit.
        self._latest = self._cursor

    def __len__(self) -> int:
        return len(self._tick_of)

    def __contains__(self, key: K) -> bool:
        return key in self._tick_of

    def register(self, key: K, expire_at: float) -> None:
        """Sets or replaces the deadline of ``key``.

        Raises:
            ValueError: ``expire_at`` is not a finite number.
        """
        if not math.isfinite(expire_at):
            raise ValueError(f"deadline must be finite, got {expire_at}")
        self.remove(key)
        # Never into a slot being drained, or a key re-armed by whoever handles its
        # expiry would fire again at once.
        tick = max(math.ceil(expire_at / self._tick_s), self._latest + 1)
        self._tick_of[key] = tick
        self._slots[tick % len(self._slots)][key] = tick

    def remove(self, key: K) -> bool:
        """Forgets ``key``; returns whether it was registered."""
        tick = self._tick_of.pop(key, None)
        if tick is None:
            return False
        del self._slots[tick % len(self._slots)][key]
        return True

    def advance(self, now: float, limit: int) -> list[K]:
        """Moves to ``now`` and returns keys whose deadline has passed.

        At most ``limit`` keys are returned; the rest come with later calls, so
        the work of one call is bounded by ``limit`` plus the slots passed. A
        ``now`` earlier than a previous one is ignored.
        """
        self._latest = target = max(self._latest, math.floor(now / self._tick_s))
        expired: list[K] = []
        # After one full round every slot has been seen.
        rounds = min(target - self._cursor, len(self._slots)) if self._tick_of else 0
        for _ in range(rounds):
            slot = self._slots[(self._cursor + 1) % len(self._slots)]
            room = limit - len(expired)
            due = (key for key, tick in slot.items() if tick <= target)
            found = list(islice(due, room + 1))
            for key in found[:room]:
                del slot[key], self._tick_of[key]
                expired.append(key)
            if len(found) > room:
                return expired
            self._cursor += 1
        self._cursor = target
        return expired

    def check_integrity(self) -> None:
        filed = {key: tick for slot in self._slots for key, tick in slot.items()}
        if filed != self._tick_of:
            raise IntegrityError("wheel slots and key table disagree")
        for number, slot in enumerate(self._slots):
            for key, tick in slot.items():
                if tick % len(self._slots) != number or tick <= self._cursor:
                    raise IntegrityError(f"{key!r} at tick {tick} is misfiled")
