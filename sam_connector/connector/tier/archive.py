"""Archive: blocks of an offload go on to the store, and others learn of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sam_connector.connector.tier.store_jobs import TransferEnd
from sam_connector.connector.tier.store_tier import StoreTier
from sam_connector.connector.tier.values import Value
from sam_connector.core.slot_pool import Content, SlotPool
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import SessionKey

#: How often a value is offered to a store that does not take it, and the wait before
#: the second time; it doubles.
_MAX_ATTEMPTS = 3
_RETRY_S = 0.1


class Archive:
    """Writes what a session has in slots to the store, then its manifest.

    Args:
        store: the store.
        slots: the host tier's; those of the session stay as long as this is at work.
        session: whose blocks.
        contexts: which.

    Attributes:
        num_unwritten: blocks that the store did not take in the end.
        reason: why.
        is_over: nothing is left to do.
    """

    def __init__(
        self,
        store: StoreTier,
        slots: SlotPool,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> None:
        self._store = store
        self._slots = slots
        self._session = session
        # Contexts of one session share a prefix; it is written once.
        self._todo: deque[Value] = deque(
            {
                value.chunk: value
                for context in contexts
                for group_id, hashes in context.block_hashes.items()
                for value in store.shape.values(group_id, hashes, context.block_start)
            }.values()
        )
        #: Before the first whole value of a range.
        self._num_left_out = sum(
            min(len(hashes), -context.block_start % store.shape.num_blocks[group_id])
            for context in contexts
            for group_id, hashes in context.block_hashes.items()
        )
        self._refused: list[Value] = []
        self._num_attempts = 1
        self._retry_at = 0.0
        self._num_writing = 0
        self._written: list[Content] = []
        self._is_announced = False
        self.num_unwritten = 0
        self.reason: str | None = None
        self.is_over = False

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to do until the store has answered."""
        if self.is_over or self._todo:
            return False
        return bool(self._num_writing or self._refused or self._is_announced)

    def advance(self, max_looks: int) -> int:
        """Goes on; returns how many blocks it has looked at."""
        num_looks = 0
        while self._todo and num_looks < max_looks:
            value = self._todo.popleft()
            num_looks += len(value.hashes)
            self._write(value)
        if not self._todo and not self._num_writing and not self._is_announced:
            self._finish()
        return num_looks

    def close(self) -> None:
        """Whatever the store still says is of no interest."""
        self.is_over = True
        self._todo.clear()

    def _write(self, value: Value) -> None:
        if any(content not in self._slots for content in value.contents):
            return  # nowhere any more: the offload counts it as missing
        reason = self._store.write(
            value, session=self._session, waiter=self._on_written
        )
        if reason is None:
            self._num_writing += 1
        else:
            self._refuse(value, reason)

    def _on_written(self, end: TransferEnd) -> None:
        self._num_writing -= 1
        if self.is_over:
            return
        if end.is_done:
            self._written.append(end.value.chunk)
        else:
            self._refuse(end.value, end.reason)

    def _refuse(self, value: Value, reason: str | None) -> None:
        self._refused.append(value)
        self.reason = reason
        pause_s = _RETRY_S * 2 ** (self._num_attempts - 1)
        self._retry_at = self._store.now() + pause_s

    def _finish(self) -> None:
        """Everything was offered: once more what was refused, then the manifest."""
        if self._refused and self._num_attempts < _MAX_ATTEMPTS:
            if self._store.now() >= self._retry_at:
                self._num_attempts += 1
                self._todo.extend(self._refused)
                self._refused.clear()
            return
        self.num_unwritten = sum(len(value.hashes) for value in self._refused)
        self._refused.clear()
        if self._num_left_out:
            self.num_unwritten += self._num_left_out
            self.reason = self.reason or "the range begins inside a value of the store"
        if not self._written:
            self.is_over = True
            return
        self._store.spm.track(self._session, self._written)
        self._is_announced = True
        self._store.sessions.announce(self._session, self._on_announced)

    def _on_announced(self, reason: str | None) -> None:
        if reason is not None and not self.is_over:
            # The blocks are there, but no other engine finds them.
            self.reason = f"the session's manifest was not written: {reason}"
            self.num_unwritten = max(1, self.num_unwritten)
        self.is_over = True
