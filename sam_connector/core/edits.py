"""Edits: what a client asks to be done with a session's cached contexts.

Evict is carried out here and in every tier. Offload and prefetch need a tier that
can; without one the answer is ``unsupported`` and nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sam_connector.core.contexts import ContextBook
from sam_connector.core.operations import OperationTable
from sam_connector.core.session_index import Context, Session
from sam_connector.core.tiers import (
    ContextBlocks,
    OperationHandle,
    SupportsSessionAwareKVManagement,
)
from sam_connector.core.types import (
    BlockCounts,
    Edit,
    EditResult,
    EditStatus,
    EditType,
    GroupId,
    SessionKey,
)


@dataclass(frozen=True, slots=True)
class _Target:
    """What an edit applies to: contexts, and a range of each."""

    contexts: tuple[Context, ...]
    start: int = 0
    end: int | None = None


class _Claim(NamedTuple):
    """Blocks ``[start, end)`` of a context in one group."""

    context: Context
    group_id: GroupId
    start: int
    end: int


class EditController:
    """Validates edits and carries them out.

    Args:
        book: sessions and contexts.
        tiers: asked at every call, since tiers may appear after start-up.
        ranges_enabled: whether edits may name a range.
        id_prefix: of operation ids.
    """

    def __init__(
        self,
        book: ContextBook,
        tiers: Callable[[], Sequence[SupportsSessionAwareKVManagement]],
        *,
        ranges_enabled: bool,
        id_prefix: str = "op",
    ) -> None:
        self._book = book
        self._tiers = tiers
        self._ranges_enabled = ranges_enabled
        self.operations = OperationTable(book.limits.max_operations, id_prefix)
        self._offloading: dict[str, list[_Claim]] = {}
        self.counts: Counter[str] = Counter()

    def apply(self, key: SessionKey, edits: Sequence[Edit]) -> list[EditResult]:
        """Carries out ``edits`` in order; one result each, never an exception."""
        results = [self._apply_one(key, edit) for edit in edits]
        self.counts.update(f"{r.type.value}/{r.status.value}" for r in results)
        return results

    def complete(self, operation_id: str, handle: OperationHandle) -> None:
        """A tier reports the end of an operation it had accepted."""
        offloaded = self._offloading.pop(operation_id, [])
        known = self.operations.get(operation_id)
        if known is None:
            return
        key, result = known
        if result.status is not EditStatus.ACCEPTED:
            return
        result = replace(
            result,
            status=handle.status,
            blocks=handle.blocks,
            num_bytes=handle.num_bytes,
            reason=handle.reason,
        )
        if _is_safe(handle):
            result = self._reclaim(result, offloaded)
        self.operations.record(key, result)
        self.counts[f"{result.type.value}/{result.status.value}"] += 1

    def _apply_one(self, key: SessionKey, edit: Edit) -> EditResult:
        session = self._book.sessions.get(key)
        if session is None:
            return self._ask_tiers(key, edit)
        target = self._target(session, edit)
        if isinstance(target, EditResult):
            return target
        if edit.type is EditType.EVICT:
            return self._evict(session, target, purge=edit.purge)
        return self._delegate(session, edit.type, target)

    def _ask_tiers(self, key: SessionKey, edit: Edit) -> EditResult:
        """An edit of a session that is not known here: another engine may know it."""
        operation_id = self.operations.new_id()
        handle = OperationHandle(status=EditStatus.NOT_FOUND)
        if not edit.is_ranged and edit.type is not EditType.OFFLOAD:
            for tier in self._tiers():
                handle = tier.edit_unknown(edit.type, operation_id, key)
                if handle.status is not EditStatus.NOT_FOUND:
                    break
        if handle.status is EditStatus.NOT_FOUND:
            return EditResult(type=edit.type, status=EditStatus.NOT_FOUND)
        result = EditResult(
            type=edit.type,
            status=handle.status,
            operation_id=operation_id,
            blocks=handle.blocks,
            reason=handle.reason,
        )
        self.operations.record(key, result)
        return result

    def _target(self, session: Session, edit: Edit) -> _Target | EditResult:
        if not edit.is_ranged:
            return _Target(tuple(session.contexts))
        start, end = edit.block_start, edit.block_end
        if not self._ranges_enabled:
            return EditResult(
                type=edit.type,
                status=EditStatus.UNSUPPORTED,
                reason="block ranges are switched off",
            )
        # A range is meant for the conversation in progress, not for side calls.
        context = session.contexts[-1] if session.contexts else None
        length = 0 if context is None else context.num_blocks
        if start is None or end is None or not 0 <= start < end:
            reason = f"[{start}, {end}) is not a half-open range of blocks"
        elif context is None or end > length:
            reason = f"[{start}, {end}) exceeds the context of {length} blocks"
        else:
            return _Target((context,), start, end)
        return EditResult(type=edit.type, status=EditStatus.REJECTED, reason=reason)

    def _evict(self, session: Session, target: _Target, *, purge: bool) -> EditResult:
        counts = self._count(target)
        tiers = [t for t in self._tiers() if EditType.EVICT in t.session_capabilities]
        contents = self._contents(target) if tiers else []
        handles = [
            tier.evict(self.operations.new_id(), session.key, contents, purge=purge)
            for tier in tiers
        ]
        if target.end is None:
            session.epoch += 1
            for context in target.contexts:
                self._book.drop(context, front=True)
            self._book.drop_if_empty(session)
        else:
            for context in target.contexts:
                for group_id in list(context.leaves):
                    self._book.index.release(
                        context,
                        group_id,
                        start=target.start,
                        end=target.end,
                        front=True,
                    )
        return EditResult(
            type=EditType.EVICT,
            status=EditStatus.COMPLETED,
            blocks=counts,
            num_bytes=sum(handle.num_bytes for handle in handles),
        )

    def _delegate(
        self, session: Session, edit_type: EditType, target: _Target
    ) -> EditResult:
        tier = next(
            (t for t in self._tiers() if edit_type in t.session_capabilities), None
        )
        if tier is None:
            return EditResult(
                type=edit_type,
                status=EditStatus.UNSUPPORTED,
                reason=f"no connector in this engine can {edit_type.value}",
            )
        operation_id = self.operations.new_id()
        operate = tier.offload if edit_type is EditType.OFFLOAD else tier.prefetch
        handle = operate(operation_id, session.key, self._contents(target))
        result = EditResult(
            type=edit_type,
            status=handle.status,
            operation_id=operation_id,
            blocks=handle.blocks,
            num_bytes=handle.num_bytes,
            reason=handle.reason,
        )
        if edit_type is EditType.OFFLOAD:
            if handle.status is EditStatus.ACCEPTED:
                self._remember(operation_id, self._claims(target))
            elif _is_safe(handle):
                result = self._reclaim(result, self._claims(target))
        self.operations.record(session.key, result)
        return result

    def _remember(self, operation_id: str, claims: list[_Claim]) -> None:
        self._offloading[operation_id] = claims
        if len(self._offloading) > self._book.limits.max_operations:
            del self._offloading[next(iter(self._offloading))]

    def _claims(self, target: _Target) -> list[_Claim]:
        claims = []
        for context in target.contexts:
            for group_id in context.leaves:
                end = self._book.index.length(context, group_id)
                if target.end is not None:
                    end = min(end, target.end)
                claims.append(_Claim(context, group_id, target.start, end))
        return claims

    def _reclaim(self, result: EditResult, claims: Sequence[_Claim]) -> EditResult:
        """What is safe elsewhere no longer needs its place in the engine's cache."""
        num_claimed = self._book.num_claimed
        for context, group_id, start, end in claims:
            if context.num_active or not context.is_live:
                continue  # in use again: the newer turn decides
            self._book.index.release(
                context, group_id, start=start, end=end, front=True
            )
        num_reclaimed = num_claimed - self._book.num_claimed
        return replace(result, blocks=replace(result.blocks, reclaimed=num_reclaimed))

    def _contents(self, target: _Target) -> list[ContextBlocks]:
        return [
            self._book.blocks_of(context, target.start, target.end)
            for context in target.contexts
        ]

    def _count(self, target: _Target) -> BlockCounts:
        index = self._book.index
        requested = resident = 0
        for context in target.contexts:
            for group_id in context.leaves:
                for segment in index.path(context, group_id):
                    low = max(segment.start, target.start)
                    high = segment.end
                    if target.end is not None:
                        high = min(high, target.end)
                    if low < high:
                        ids = segment.block_ids
                        part = ids[low - segment.start : high - segment.start]
                        requested += len(part)
                        resident += len(part) - part.count(0)  # type: ignore[arg-type]
        return BlockCounts(
            requested=requested, done=resident, missing=requested - resident
        )


def _is_safe(handle: OperationHandle) -> bool:
    return handle.is_safe or handle.status is EditStatus.COMPLETED
