"""A host tier over vLLM's block pool, with ranks that are played by the test.

    bench = Bench()
    bench.cache("abcd")              # four blocks in the engine's prefix cache
    bench.offload("abcd")
    bench.step()                     # copies reach the ranks
    bench.report()                   # and end
    assert bench.in_tier("abcd") == "abcd"

A context is a string, one letter a block, as in ``tests.core.builders``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from sam_connector.config import HostTierConfig, SavePolicy
from sam_connector.connector.metadata import RankResult
from sam_connector.connector.tier.host_tier import HostTier
from sam_connector.connector.tier.jobs import Job, JobTable
from sam_connector.connector.tier.state import TierState
from sam_connector.core.clock import ManualClock
from sam_connector.core.contexts import Chain
from sam_connector.core.slot_pool import Content, SlotPool
from sam_connector.core.tier_contexts import TierContexts
from sam_connector.core.tiers import ContextBlocks, OperationHandle, TierEventType
from sam_connector.core.types import BlockHash, BlockId, GroupId, SessionKey, Zone
from sam_connector.vllm_adapter.block_pool import BlockPoolAdapter
from sam_connector.vllm_adapter.gpu_cache import GpuCache
from tests.core.builders import G0, chain, key
from tests.core.slots import blocks_of, contents, put

BLOCK_SIZE = 16
BLOCK_BYTES = 100

Finder = Callable[[GroupId, BlockHash], BlockId]


class Directory:
    """The manager's part: contexts that the test knows by session and id."""

    def __init__(self) -> None:
        self.known: dict[tuple[SessionKey, int], ContextBlocks] = {}
        self.restored: list[tuple[str, int, str]] = []

    def contents(self, key: SessionKey, context_id: int) -> ContextBlocks | None:
        return self.known.get((key, context_id))

    def restore(self, key: SessionKey, context_id: int, find: Finder) -> None:
        blocks = self.known.get((key, context_id))
        hashes = () if blocks is None else blocks.block_hashes[G0]
        found = "".join(chr(h[-1]) for h in hashes if find(G0, h))
        self.restored.append((key.session_id, context_id, found))


class FakeChains:
    """Reads hashes off requests whose prompt is a string."""

    def __init__(self, groups: Iterable[GroupId] = (G0,)) -> None:
        self.block_sizes = dict.fromkeys(groups, BLOCK_SIZE)

    def hashes(self, request: Any, group_id: GroupId) -> list[BlockHash]:
        return chain(request.text)

    def computed(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> dict[GroupId, Chain]:
        return {
            group_id: Chain(hashes=chain(request.text), block_ids=block_ids[group_id])  # type: ignore[arg-type]
            for group_id in self.block_sizes
        }


def request(text: str, request_id: str = "r", *, extra_tokens: int = 1) -> Any:
    """A request whose prompt is ``text`` and so many tokens."""
    return SimpleNamespace(
        request_id=request_id,
        text=text,
        num_tokens=len(text) * BLOCK_SIZE + extra_tokens,
        skip_reading_prefix_cache=False,
    )


class Bench:
    """The tier, the engine's pool, and a clock.

    Args:
        num_blocks: of the engine, the null block not included.
        num_slots: of the tier.
        num_ranks: that have to report each job.
        budget: most blocks held for copies at a time.
        policy: what is saved without being asked for.
        window: demotion begins with fewer unclaimed blocks than that.
        reserve: share of the engine's blocks that a prefetch leaves free.
        max_protected: slots that leases may protect.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        num_slots: int = 16,
        num_ranks: int = 1,
        budget: int = 64,
        policy: SavePolicy = SavePolicy.ON_DEMAND,
        window: int = 0,
        reserve: float = 0.0,
        max_protected: int = 99,
        groups: Iterable[GroupId] = (G0,),
    ) -> None:
        self.num_ranks = num_ranks
        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
        self.adapter = BlockPoolAdapter(self.pool)
        self.clock = ManualClock(1_000.0)
        self.directory = Directory()
        slots = SlotPool(num_slots)
        chains: Any = FakeChains(groups)
        self.state = TierState(
            gpu=GpuCache(self.pool, chains.block_sizes, reserve=reserve),
            slots=slots,
            contexts=TierContexts(slots, max_protected=max_protected),
            jobs=JobTable(num_ranks),
            config=HostTierConfig(host_bytes=1, save_policy=policy),
            clock=self.clock,
            block_bytes=dict.fromkeys(chains.block_sizes, BLOCK_BYTES),
            max_inflight_blocks=budget,
            directory=self.directory,
        )
        self.tier = HostTier(self.state, chains, demotion_window=window)
        self.tier.has_listener = True
        self.num_operations = 0

    # --- the engine ------------------------------------------------------------

    def cache(self, text: str, group_id: GroupId = G0) -> list[Any]:
        """Computes a context; its blocks are free and can be hit."""
        blocks = self.compute(text, group_id)
        self.pool.free_blocks(blocks[::-1])
        return blocks

    def compute(self, text: str, group_id: GroupId = G0) -> list[Any]:
        """The same for a request that still runs."""
        blocks: list[Any] = []
        for index, content in enumerate(contents(text, group_id)):
            block = self.state.gpu.find(content)
            if block is not None:
                self.pool.touch([block])
            else:
                (block,) = self.pool.get_new_blocks(1)
                self.state.gpu.publish(block, content, index)
            blocks.append(block)
        return blocks

    def lose(self, text: str) -> None:
        """Other traffic displaces the last block of a context."""
        block = self.state.gpu.find(contents(text)[-1])
        assert block is not None
        self.pool.evict_blocks({block.block_id})

    def lose_all(self, text: str) -> None:
        for end in range(1, len(text) + 1):
            self.lose(text[:end])

    def claim(self, text: str, zone: Zone, session: str = "s") -> None:
        """A session's context 1 holds blocks in the engine's cache."""
        queue = self.adapter.free_queue
        context = SimpleNamespace(
            session=SimpleNamespace(key=key(session)), context_id=1
        )
        owner = SimpleNamespace(deadlines=[context])
        claim = queue.open_claim(owner, zone, 9.0 if zone is Zone.C else 0.0)
        for content in reversed(contents(text)):  # the tail is the first to go
            block = self.state.gpu.find(content)
            assert block is not None
            queue.claim(block, claim)

    def in_gpu(self, text: str) -> str:
        """Letters of the blocks that the engine has."""
        return _letters(text, self.state.gpu.find)

    # --- the tier ---------------------------------------------------------------

    def put(self, text: str) -> None:
        """The tier has a context, and nobody holds it."""
        put(self.state.slots, [c for c in contents(text) if c not in self.state.slots])

    def know(self, text: str, session: str = "s", context_id: int = 1) -> ContextBlocks:
        """The manager knows a context."""
        blocks = blocks_of(text, context_id)
        self.directory.known[key(session), context_id] = blocks
        return blocks

    def offload(
        self, *texts: str, session: str = "s", first_id: int = 1
    ) -> OperationHandle:
        """Asks to offload contexts that the manager knows."""
        return self._open("offload", texts, session, first_id)

    def prefetch(
        self, *texts: str, session: str = "s", first_id: int = 1
    ) -> OperationHandle:
        return self._open("prefetch", texts, session, first_id)

    def _open(
        self, name: str, texts: Iterable[str], session: str, first_id: int
    ) -> OperationHandle:
        self.num_operations += 1
        known = [
            self.know(text, session, context_id)
            for context_id, text in enumerate(texts, first_id)
        ]
        operate = getattr(self.tier, name)
        handle: OperationHandle = operate(
            f"op-{self.num_operations}", key(session), known
        )
        return handle

    def evict(self, *texts: str, session: str = "s", first_id: int = 1) -> None:
        known = [blocks_of(text, i) for i, text in enumerate(texts, first_id)]
        self.tier.evict("op-evict", key(session), known, purge=False)
        for blocks in known:
            self.directory.known.pop((key(session), blocks.context_id), None)
            self.tier.release(key(session), blocks.context_id)

    def in_tier(self, text: str) -> str:
        """Letters of the blocks that the tier has."""
        return _letters(text, self.state.slots.get)

    # --- steps --------------------------------------------------------------------

    @property
    def jobs(self) -> list[Job]:
        """Under way, oldest first."""
        return list(self.state.jobs.open_jobs().values())

    def step(self) -> list[str]:
        """The tier plans copies; returns them as "store abc"."""
        before = {job.job_id for job in self.jobs}
        sent = {job.job_id for job in self.tier.on_step().jobs}
        self.check()
        assert sent >= {job.job_id for job in self.jobs} - before
        return [described(job) for job in self.jobs if job.job_id in sent]

    def finish(self, request: Any, text: str | None = None) -> list[str]:
        """A request ends: its blocks are computed as far as ``text`` says."""
        blocks = self.compute(request.text if text is None else text)
        self.tier.on_request_finished(request, [[b.block_id for b in blocks]])
        started = [described(job) for job in self.jobs]
        self.pool.free_blocks(blocks[::-1])
        self.check()
        return started

    def report(
        self,
        *jobs: Job,
        ranks: Iterable[int] | None = None,
        error: str | None = None,
    ) -> None:
        """All ranks (or these) are done with all jobs (or these)."""
        self.tier.on_report(
            [
                RankResult(rank, job.job_id, error)
                for job in jobs or self.jobs
                for rank in (range(self.num_ranks) if ranks is None else ranks)
            ]
        )
        self.check()

    def run(self, max_steps: int = 50) -> None:
        """Steps until nothing is left to do; all copies work."""
        for _ in range(max_steps):
            self.step()
            if not self.jobs:
                break
            self.report()
        assert not self.jobs

    def ended(self) -> dict[str, OperationHandle]:
        """Operations that have ended since the last call."""
        return {
            str(event.operation_id): event.handle
            for event in self.tier.take_session_events()
            if event.type is TierEventType.OPERATION and event.handle is not None
        }

    def check(self) -> None:
        self.tier.check_integrity()
        self.adapter.free_queue.check_integrity()

    def check_idle(self) -> None:
        """Nothing is held for a copy any more."""
        self.check()
        assert not self.jobs
        assert self.state.gpu.num_pins == self.state.slots.num_pinned == 0
        assert not any(b.ref_cnt for b in self.pool.blocks if not b.is_null)
        assert self.state.jobs.num_blocks == 0
        assert not self.state.jobs.storing
        assert not self.state.jobs.loading


def described(job: Job) -> str:
    letters = "".join(chr(content[1][-1]) for content in job.contents)
    return f"{job.direction.value} {letters}"


def _letters(text: str, find: Callable[[Content], Any]) -> str:
    return "".join(
        letter
        for letter, content in zip(text, contents(text), strict=True)
        if find(content) is not None
    )
