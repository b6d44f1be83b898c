"""A harness that is wrong about one session in five, and right about the others.

A wrong session asks with every request for a lease of a random length. After each
answer it does one of three things by chance: it changes its lease at random, it
evicts itself although it goes on, or it prefetches a session that has ended. It is
never offloaded while it waits and never evicted when it ends: what it leaves behind
stays under its last lease.

Chance depends on the seed and on the turn alone, so every pass is told the same, but
for which sessions have ended by then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from benchmarks.demo.policy import AgentPolicy, ControlCall, edit, lease
from benchmarks.demo.workload import Next, Turn

#: One session in this many is wrong.
ONE_IN = 5
#: From "forget it at once" to the longest that a server grants.
LEASES_S = (0.0, 1.0, 10.0, 100.0, 3600.0)


def wrong_sessions(turns: Sequence[Turn], seed: int) -> frozenset[str]:
    """One session in five, rounded to the nearest, but one at least.

    By chance one out of each five that are next to each other in their number of
    turns, so that the wrong ones are neither all long nor all short.
    """
    lengths = Counter(turn.session for turn in turns)
    ordered = sorted(lengths, key=lambda session: (-lengths[session], session))
    fives = [ordered[i : i + ONE_IN] for i in range(0, len(ordered), ONE_IN)]
    chance = random.Random(seed)
    return frozenset(
        chance.choice(five)
        for five in fives
        if five is fives[0] or 2 * len(five) > ONE_IN
    )


class WrongPolicy(AgentPolicy):
    """What such a harness says in one pass.

    Args:
        turns: of the whole workload.
        run: name of the pass.
        seed: chooses who is wrong, and how.
    """

    def __init__(self, turns: Sequence[Turn], run: str, *, seed: int = 0) -> None:
        super().__init__(turns, run)
        self._seed = seed
        self._wrong = wrong_sessions(turns, seed)
        self._ended: list[str] = []

    def hint(self, turn: Turn) -> dict[str, object] | None:
        hint = super().hint(turn)
        if hint is None or turn.session not in self._wrong:
            return hint
        ttl_s = self._chance("request", turn).choice(LEASES_S)
        return hint | {"cache_control": {"type": "ephemeral", "ttl": ttl_s}}

    def before_turn(self, turn: Turn) -> tuple[ControlCall, ...]:
        return () if turn.session in self._wrong else super().before_turn(turn)

    def after_turn(self, turn: Turn) -> tuple[ControlCall, ...]:
        if turn.next is Next.END:
            self._ended.append(turn.session)
        if turn.session not in self._wrong:
            return super().after_turn(turn)
        if turn.next is Next.SIDE_CALL:
            return ()
        return (self._mistake(turn),)

    def _mistake(self, turn: Turn) -> ControlCall:
        chance = self._chance("answer", turn)
        kind = chance.choice(("lease", "evict", "prefetch"))
        if kind == "prefetch" and self._ended:
            # Of one that was evicted at its end nothing is left to bring back.
            left = [name for name in self._ended if name in self._wrong]
            return edit(chance.choice(left or self._ended), self._run, "prefetch")
        if kind == "evict" and turn.next is not Next.END:
            return edit(turn.session, self._run, "evict")
        return lease(turn.session, self._run, chance.choice(LEASES_S))

    def _chance(self, what: str, turn: Turn) -> random.Random:
        return random.Random(f"{self._seed} {what} {turn.index}")
