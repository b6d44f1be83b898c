"""What the parts of the host tier share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sam_connector.config import HostTierConfig
from sam_connector.connector.tier.jobs import Copy, Job, JobTable
from sam_connector.connector.tier.session_directory import (
    NoSessions,
    SessionDirectory,
)
from sam_connector.connector.tier.store_tier import StoreTier
from sam_connector.core.clock import Clock
from sam_connector.core.slot_pool import Content, SlotPool
from sam_connector.core.tier_contexts import TierContexts
from sam_connector.core.types import GroupId, SessionKey
from sam_connector.transfer.contract import Direction
from sam_connector.vllm_adapter.gpu_cache import GpuCache


@dataclass(eq=False, slots=True, kw_only=True)
class TierState:
    """Slots, copies under way, and the engine's cache.

    Attributes:
        gpu: the engine's cache.
        slots: the tier's memory.
        contexts: which sessions hold which slots.
        jobs: copies under way.
        config: settings.
        clock: where time comes from.
        block_bytes: size of a block of each group, all ranks together.
        max_inflight_blocks: most engine blocks held for copies at a time.
        directory: the session-aware manager.
        remote: the store behind the tier; ``None`` for none.
        generation: raised whenever all content becomes void.
        counts: what has happened, for ``stats``.
    """

    gpu: GpuCache
    slots: SlotPool
    contexts: TierContexts
    jobs: JobTable
    config: HostTierConfig
    clock: Clock
    block_bytes: Mapping[GroupId, int]
    max_inflight_blocks: int
    directory: SessionDirectory = field(default_factory=NoSessions)
    remote: StoreTier | None = None
    generation: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def budget(self) -> int:
        """Engine blocks that may be held for copies in addition."""
        return self.max_inflight_blocks - self.jobs.num_blocks

    def store(self, sources: Sequence[tuple[Content, Any]], **more: Any) -> Job | None:
        """Starts to copy blocks to the tier, as many as there are slots for.

        Leases in the tier are not broken for it.

        Args:
            sources: content and block, first blocks of a sequence first; none of
                them in the tier or on the way there.
            **more: attributes of the job.

        Returns:
            The job; ``None`` if there is no slot at all.
        """
        num_slots = self.slots.num_available(len(sources))
        if not num_slots:
            return None
        sources = sources[:num_slots]
        blocks = [block for _, block in sources]
        self.gpu.pin(blocks)
        copies = [
            Copy(content, block, slot)
            for (content, block), slot in zip(
                sources, self.slots.allocate(num_slots), strict=True
            )
        ]
        return self.jobs.start(
            Direction.STORE, copies, generation=self.generation, **more
        )

    def is_wanted(self, content: Content) -> bool:
        """Whether the tier neither has a content nor is getting it."""
        return content not in self.slots and content not in self.jobs.storing

    def keep(self, contexts: Iterable[tuple[SessionKey, int]]) -> None:
        """Sessions hold what the tier has of these contexts."""
        for session, context_id in contexts:
            blocks = self.directory.contents(session, context_id)
            if blocks is not None:
                self.contexts.keep(session, blocks)

    def num_bytes(self, copies: Sequence[Copy]) -> int:
        return sum(self.block_bytes[copy.content[0]] for copy in copies)
