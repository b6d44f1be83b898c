"""What a store is told, and asked, of sessions: leases, manifests, ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sam_connector.connector.tier.store_jobs import SlotSide
from sam_connector.connector.tier.values import ValueShape
from sam_connector.core.slot_pool import Content
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import BlockHash, GroupId, SessionKey
from sam_connector.pooling.events import Ended, Published, Recalled
from sam_connector.pooling.leases import SessionLeases
from sam_connector.pooling.manager import SessionPoolingManager
from sam_connector.pooling.manifest import Manifest, ManifestContext

#: Longest lease that is taken over from another engine; see ``Limits.max_ttl_s``.
_MAX_LEASE_S = 3_600.0

#: Told once: a session's manifest, or why there is none; neither if there just is none.
OnRecalled = Callable[[Manifest | None, str | None], None]

#: Told once: why a manifest was not written; ``None`` if it was.
OnAnnounced = Callable[[str | None], None]

#: Told once: whether there was such a session, and why that is not known.
OnEnded = Callable[[bool, str | None], None]


class StoreSessions:
    """Sessions, in the words of the pooling manager.

    Args:
        state: of the host tier.
        spm: the pooling manager.
        shape: how blocks make values.
    """

    def __init__(
        self, state: SlotSide, spm: SessionPoolingManager, shape: ValueShape
    ) -> None:
        self._state = state
        self._spm = spm
        self._shape = shape
        self._leases = SessionLeases()
        self._announcing: dict[int, list[OnAnnounced]] = {}
        self._recalls: dict[int, OnRecalled] = {}
        self._ends: dict[int, OnEnded] = {}

    def announce(self, session: SessionKey, waiter: OnAnnounced) -> None:
        """Writes the session's manifest, as the directory knows it."""
        directory = self._state.directory
        contexts = directory.contexts_of(session)
        if not contexts:
            waiter("the session is not known any more")
            return
        lease_s = (
            max((c.deadline for c in contexts), default=0.0) - self._state.clock.now()
        )
        # The last value of a sequence that has grown is named by nobody.
        self._spm.retain(session, self._num_blocks(contexts))
        ticket = self._spm.publish(
            session,
            [
                ManifestContext(
                    hashes={
                        group_id: tuple(hashes)
                        for group_id, hashes in context.block_hashes.items()
                    }
                )
                for context in contexts
            ],
            parent=directory.parent_of(session),
            lease_s=max(0.0, lease_s),
        )
        # Several of a session share a ticket until the manifest is written.
        self._announcing.setdefault(ticket, []).append(waiter)

    def recall(self, session: SessionKey, waiter: OnRecalled) -> None:
        """Reads what other engines have written of a session."""
        self._recalls[self._spm.recall(session)] = waiter

    def adopt(
        self,
        manifest: Manifest,
        contexts: Sequence[Mapping[GroupId, Sequence[BlockHash]]],
    ) -> None:
        """A session of another engine lives on here: its values stay alive."""
        chunks = [
            value.chunk
            for blocks in contexts
            for group_id, hashes in blocks.items()
            for value in self._shape.values(group_id, hashes)
        ]
        self._spm.track(manifest.session, chunks)
        # Whoever wrote it may have said anything.
        lease_s = min(manifest.lease_until - time.time(), _MAX_LEASE_S)
        if lease_s > 0:
            self._spm.set_lease(manifest.session, self._state.clock.now() + lease_s)

    def end(
        self,
        session: SessionKey,
        *,
        purge: Sequence[Content] = (),
        waiter: OnEnded | None = None,
    ) -> None:
        """The session is over everywhere: it is not kept alive, and not found.

        Args:
            session: which.
            purge: values to delete at once.
            waiter: if anybody wants to know.
        """
        self._leases.forget(session)
        ticket = self._spm.end(session, purge_chunks=purge)
        if waiter is not None:
            self._ends[ticket] = waiter

    def purgeable(
        self, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> list[Content]:
        """Values past the longest prefix that another known session shares."""
        return [
            chunk
            for context in contexts
            for group_id, hashes in context.block_hashes.items()
            for chunk in self._spm.unshared_tail(
                session,
                [
                    value.chunk
                    for value in self._shape.values(
                        group_id, hashes, context.block_start
                    )
                ],
            )
        ]

    def reset(self) -> None:
        """Nothing that was known of the store holds any more."""
        self._leases.clear()

    def hear(self) -> None:
        """What the pooling manager's threads have found out."""
        for event in self._spm.take_events():
            match event:
                case Published():
                    for waiter in self._announcing.pop(event.ticket, ()):
                        waiter(event.reason)
                case Recalled():
                    recalled = self._recalls.pop(event.ticket, None)
                    if recalled is not None:
                        recalled(event.manifest, event.reason)
                case Ended():
                    ended = self._ends.pop(event.ticket, None)
                    if ended is not None:
                        ended(event.found, event.reason)

    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        """A context's lease; the store keeps a session's values for the longest."""
        self._spm.set_lease(session, self._leases.set(session, context_id, deadline))

    def num_blocks_of(self, session: SessionKey) -> int:
        """Blocks of a session that are known to be in the store."""
        known = self._spm.chunks_of(session)
        if not known:
            return 0
        num_blocks = self._num_blocks(self._state.directory.contexts_of(session))
        return sum(num_blocks.get(chunk, 0) for chunk in known)

    def _num_blocks(self, contexts: Sequence[ContextBlocks]) -> dict[Content, int]:
        """How many blocks there are in each value of contexts."""
        return {
            value.chunk: len(value.hashes)
            for context in contexts
            for group_id, hashes in context.block_hashes.items()
            for value in self._shape.values(group_id, hashes, context.block_start)
        }
