"""Drives the servers at one pool size: repeats by turns, then the identity.

All servers live as long as the pool size is under test and one works at a time; the
others wait and use next to no CPU. Every pass begins with empty caches, those in host
memory included. The order within a repeat rotates, so that no server always comes
first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.demo.client import DemoClient
from benchmarks.demo.comparison import PoolComparison
from benchmarks.demo.harness import Harness
from benchmarks.demo.identity import IdentityRecord, generate_one_by_one
from benchmarks.demo.measures import measure
from benchmarks.demo.policy import AgentPolicy
from benchmarks.demo.replay import Replay, RunRecord
from benchmarks.demo.server import BLOCK_SIZE, ServerKind
from benchmarks.demo.workload import Turn, Workload

#: The servers to drive, and what tells each about its agents: made anew for every
#: pass from the workload's turns and the name of the pass. ``None`` says nothing.
Arms = Mapping[ServerKind, Callable[[Sequence[Turn], str], AgentPolicy] | None]

DEMO_ARMS: Arms = {
    ServerKind.STOCK: None,
    ServerKind.TIER: None,
    ServerKind.HINTS: AgentPolicy,
}

#: In these turns children end, others start, and leads wait for both.
IDENTITY_TURNS = slice(62, 108)
_NO_TIER: Mapping[str, object] = {"saved_bytes": 0, "loaded_bytes": 0}


@dataclass(kw_only=True)
class PoolRecord:
    """Everything recorded at one pool size.

    Attributes:
        control_calls: how often each call had which outcome, in all repeats.
    """

    replays: dict[ServerKind, list[RunRecord]] = field(default_factory=dict)
    identity: dict[ServerKind, IdentityRecord] = field(default_factory=dict)
    stats: dict[ServerKind, Mapping[str, object]] = field(default_factory=dict)
    control_calls: dict[ServerKind, Counter[str]] = field(default_factory=dict)

    def comparison(
        self, workload: Workload, *, label: str, num_blocks: int
    ) -> PoolComparison:
        return PoolComparison(
            label=label,
            num_blocks=num_blocks,
            runs={
                kind: [measure(record, workload, BLOCK_SIZE) for record in records]
                for kind, records in self.replays.items()
            },
            sam_stats=self.stats,
            control_calls=sum(self.control_calls.values(), Counter()),
        )


class PoolRun:
    """One pool size.

    Args:
        arms: in the order of the first repeat.
        connect: makes a client of a running server.
        report: called with one line of progress now and then.
    """

    def __init__(
        self,
        workload: Workload,
        arms: Arms,
        connect: Callable[[ServerKind], DemoClient],
        report: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._arms = arms
        self._connect = connect
        self._report = report
        self._record = PoolRecord(
            replays={kind: [] for kind in arms},
            control_calls={kind: Counter() for kind in arms},
        )

    async def run(self, *, num_repeats: int, identity: bool) -> PoolRecord:
        for kind in self._arms:
            await self._warm_up(kind)
        for repeat in range(num_repeats):
            for kind in order(list(self._arms), repeat):
                await self._replay(kind, repeat)
        if identity:
            for kind in self._arms:
                await self._generate_one_by_one(kind)
        return self._record

    async def _warm_up(self, kind: ServerKind) -> None:
        """A server's first requests pay for lazy set-up, which is no one's TTFT."""
        async with self._connect(kind) as client:
            for length in (40, 400):
                await client.generate([7] * length, 2, None)

    async def _replay(self, kind: ServerKind, repeat: int) -> None:
        report = self._reporter(f"{kind} #{repeat + 1}")
        async with self._connect(kind) as client:
            harness = await self._begin(client, kind, run=f"demo-{repeat + 1}")
            before = await _stats(client, kind)
            replay = Replay(client, self._workload, harness=harness, report=report)
            record = await replay.run()
            after = self._record.stats[kind] = await _stats(client, kind)
        record.saved_bytes = _grown("saved_bytes", before, after)
        record.loaded_bytes = _grown("loaded_bytes", before, after)
        first = record.results[self._workload.turns[0].index]
        if first.cached_tokens:
            raise RuntimeError(f"{kind}: the cache was not empty at the start")
        self._record.replays[kind].append(record)
        self._record.control_calls[kind] += harness.outcomes
        report(f"done in {record.duration_s:.1f} s {_told(harness)}".rstrip())

    async def _generate_one_by_one(self, kind: ServerKind) -> None:
        report = self._reporter(str(kind))
        turns = self._workload.turns[IDENTITY_TURNS]
        async with self._connect(kind) as client:
            harness = await self._begin(client, kind, run="identity")
            before = await _stats(client, kind)
            record = await generate_one_by_one(
                client, self._workload, turns, harness=harness, report=report
            )
            after = await _stats(client, kind)
        record.loaded_bytes = _grown("loaded_bytes", before, after)
        self._record.identity[kind] = record
        report(f"identity done {_told(harness)}".rstrip())

    async def _begin(
        self, client: DemoClient, kind: ServerKind, *, run: str
    ) -> Harness:
        """Empties all caches of the server and gives it a harness without history."""
        await client.reset(sessions=kind is not ServerKind.STOCK)
        make_policy = self._arms[kind]
        policy = make_policy(self._workload.turns, run) if make_policy else None
        return Harness(client, policy)

    def _reporter(self, name: str) -> Callable[[str], None]:
        return lambda line: self._report(f"{name}: {line}")


def order(kinds: list[ServerKind], repeat: int) -> list[ServerKind]:
    """The servers of one repeat in the order in which they are driven."""
    start = repeat % len(kinds)
    return kinds[start:] + kinds[:start]


async def _stats(client: DemoClient, kind: ServerKind) -> Mapping[str, object]:
    return _NO_TIER if kind is ServerKind.STOCK else await client.stats()


def _grown(name: str, before: Mapping[str, object], after: Mapping[str, object]) -> int:
    """What a counter counted meanwhile."""
    return int(str(after[name])) - int(str(before[name]))


def _told(harness: Harness) -> str:
    counts = sorted(harness.outcomes.items())
    return ", ".join(f"{outcome} {count}" for outcome, count in counts)
