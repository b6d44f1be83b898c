"""Sessions that this engine has never served, but another may have."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence

from typing_extensions import override

from sam_connector.connector.tier.jobs import Job
from sam_connector.connector.tier.operations import ContextBlock, Operation
from sam_connector.connector.tier.prefetch import Prefetch
from sam_connector.connector.tier.state import TierState
from sam_connector.core.slot_pool import Slot
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import BlockHash, EditStatus, GroupId, SessionKey
from sam_connector.pooling.manifest import Manifest


class Recall(Prefetch):
    """A prefetch of a session that this engine has never served.

    What its blocks are says its manifest, which is never believed about what a block
    holds: only what has been read under its own hash counts, and only what is in the
    engine's cache in the end becomes a session here. Nor about how much there is: one
    context is begun at a time, the one used last first, and of each no more than the
    engine's cache can hold.
    """

    def __init__(
        self,
        state: TierState,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        super().__init__(state, session, ())
        self._manifest: Manifest | None = None
        self._contexts: list[ContextBlocks] = []
        #: Those that nothing was begun of yet, the next at the front.
        self._todo: deque[ContextBlocks] = deque()
        self._is_asking = True
        self.is_found = False
        assert state.remote is not None
        state.remote.sessions.recall(session, self._on_manifest)

    @property
    @override
    def has_more(self) -> bool:
        return self._is_asking or bool(self._todo) or super().has_more

    @property
    @override
    def waits_for_store(self) -> bool:
        return self._is_asking or super().waits_for_store

    def _on_manifest(self, manifest: Manifest | None, reason: str | None) -> None:
        self._is_asking = False
        if self.has_ended:
            return
        if manifest is None:
            self._reason = reason
            return
        self.is_found = True
        self._manifest = manifest
        for context in reversed(manifest.contexts):
            self.num_requested += sum(map(len, context.hashes.values()))
            self._todo.append(ContextBlocks(block_hashes=context.hashes))

    @override
    def advance(self, budget: int, max_looks: int) -> int:
        if self._todo and not super().has_more:
            self._begin(self._todo.popleft())
        return super().advance(budget, max_looks)

    def _begin(self, context: ContextBlocks) -> None:
        """Goes on with a context, as far as it can be one."""
        limit = self._state.gpu.num_blocks
        fitting = ContextBlocks(
            block_hashes={
                # No sequence has a block twice.
                group_id: list(dict.fromkeys(itertools.islice(hashes, limit)))
                for group_id, hashes in context.block_hashes.items()
            }
        )
        self._contexts.append(fitting)
        num_requested = self.num_requested
        self._add([fitting])
        self.num_requested = num_requested  # all of it was counted before

    @override
    def _load(self, wanted: list[tuple[ContextBlock, Slot]]) -> None:
        if self._state.gpu.num_takeable(len(wanted)) < len(wanted):
            self._todo.clear()
        super()._load(wanted)

    @override
    def end(self) -> OperationHandle:
        handle = super().end()
        if self.is_found:
            return handle
        if self._reason is None:
            return OperationHandle(status=EditStatus.NOT_FOUND)
        return OperationHandle(status=EditStatus.REJECTED, reason=self._reason)

    @override
    def _restore(self) -> None:
        if self._manifest is None:
            return
        state = self._state
        contexts = [
            {
                group_id: list(
                    itertools.takewhile(
                        functools.partial(self._is_in_engine, group_id), hashes
                    )
                )
                for group_id, hashes in context.block_hashes.items()
            }
            for context in reversed(self._contexts)
        ]
        found = [blocks for blocks in contexts if any(blocks.values())]
        state.directory.adopt(
            self.session,
            self._manifest.parent,
            found,
            state.gpu.find_id,
            state.clock.now(),
        )
        if found and state.remote is not None:
            state.remote.sessions.adopt(self._manifest, found)

    def _is_in_engine(self, group_id: GroupId, block_hash: BlockHash) -> bool:
        return self._state.gpu.find((group_id, block_hash)) is not None


class RemoteEvict(Operation):
    """An evict of such a session: nobody finds it any more."""

    def __init__(
        self,
        state: TierState,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        super().__init__(state, session, contexts)
        self._is_asking = True
        self._is_found = False
        assert state.remote is not None
        state.remote.sessions.end(session, waiter=self._on_ended)

    @property
    @override
    def has_more(self) -> bool:
        return self._is_asking

    @property
    @override
    def waits_for_store(self) -> bool:
        return self._is_asking

    @override
    def advance(self, budget: int, max_looks: int) -> int:
        return 0

    @override
    def on_copied(self, job: Job, num_blocks: int) -> None:
        """It copies nothing."""

    @override
    def end(self) -> OperationHandle:
        super().end()
        if self._reason is not None:
            return OperationHandle(status=EditStatus.REJECTED, reason=self._reason)
        status = EditStatus.COMPLETED if self._is_found else EditStatus.NOT_FOUND
        return OperationHandle(status=status)

    @override
    def _let_go(self) -> None:
        """It holds nothing."""

    def _on_ended(self, is_found: bool, reason: str | None) -> None:
        self._is_asking = False
        self._is_found = is_found
        self._reason = reason
