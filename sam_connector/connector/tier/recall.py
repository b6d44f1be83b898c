"""Sessions that this engine has never served, but another may have."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from typing_extensions import override

from sam_connector.connector.tier.jobs import Job
from sam_connector.connector.tier.operations import Operation
from sam_connector.connector.tier.prefetch import Prefetch
from sam_connector.connector.tier.state import TierState
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import BlockHash, EditStatus, GroupId, SessionKey
from sam_connector.pooling.manifest import Manifest


class Recall(Prefetch):
    """A prefetch of a session that this engine has never served.

    What its blocks are says its manifest, which is never believed about what a block
    holds: only what has been read under its own hash counts, and only what is in the
    engine's cache in the end becomes a session here.
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
        self._is_asking = True
        self.is_found = False
        assert state.remote is not None
        state.remote.sessions.recall(session, self._on_manifest)

    @property
    @override
    def has_more(self) -> bool:
        return self._is_asking or super().has_more

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
        self._contexts = _fitting(manifest, self._state.gpu.num_blocks)
        self._add(self._contexts)

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
            for context in self._contexts
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


def _fitting(manifest: Manifest, room: int) -> list[ContextBlocks]:
    """What an engine's cache of ``room`` blocks can hold, the latest context first.

    A manifest comes from outside, and this is work of the engine's thread.
    """
    found: list[ContextBlocks] = []
    for context in reversed(manifest.contexts):
        hashes = {group_id: of[:room] for group_id, of in context.hashes.items()}
        room -= max(map(len, hashes.values()), default=0)
        found.append(ContextBlocks(block_hashes=hashes))
    return found[::-1]


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
