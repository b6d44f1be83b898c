"""The capability a KV connector declares to be driven by session hints.

The RFC's ``SupportsSessionAwareKVManagement``. The manager passes sessions and
content hashes; what a tier makes of them (slots, keys, transfers) stays its own.
"""

from __future__ import annotations

import enum
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from sam_connector.core.types import (
    NO_BLOCKS,
    BlockCounts,
    BlockHash,
    EditStatus,
    EditType,
    GroupId,
    SessionKey,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBlocks:
    """A context, or the part of it an edit names, as content hashes per group.

    Attributes:
        block_hashes: of every block, or of those of the range.
        block_start: logical index of the first hash in every group.
        is_whole: it is all of the context, not a range.
        context_id: tells the contexts of one engine apart.
        deadline: end of the context's lease, monotonic seconds; 0 for none.
        resume_at: when its next request is expected, monotonic seconds; 0 if nobody
            has said.
    """

    block_hashes: Mapping[GroupId, Sequence[BlockHash]]
    block_start: int = 0
    is_whole: bool = True
    context_id: int = 0
    deadline: float = 0.0
    resume_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationHandle:
    """A tier's answer to an operation: done, under way, or why not.

    ``status`` ACCEPTED promises exactly one ``OPERATION`` event later.

    Attributes:
        is_safe: after an offload, whatever of the contexts the engine has is in the
            tier as well, so that the engine's own copy may go. COMPLETED implies it.
    """

    status: EditStatus
    blocks: BlockCounts = NO_BLOCKS
    num_bytes: int = 0
    reason: str | None = None
    is_safe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How many of a session's blocks a tier holds, and under which name."""

    tier: str
    num_blocks: int


class TierEventType(enum.Enum):
    SAVE = enum.auto()
    LOAD = enum.auto()
    MISS = enum.auto()
    PRESSURE = enum.auto()
    #: An accepted operation has ended.
    OPERATION = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierEvent:
    """Something a tier observed; ``handle`` and ``operation_id`` for OPERATION."""

    type: TierEventType
    operation_id: str | None = None
    handle: OperationHandle | None = None
    num_blocks: int = 0
    num_bytes: int = 0


_instances: weakref.WeakSet[SupportsSessionAwareKVManagement] = weakref.WeakSet()


class SupportsSessionAwareKVManagement(ABC):
    """Mix-in for KV connectors that understand sessions.

    Inherit from it next to ``KVConnectorBase_V1``, as with vLLM's ``SupportsHMA``.
    All methods are called in the scheduler's process, on its thread, between
    steps; they must return at once and must not raise for anything a client can
    cause. An operation that is not in ``session_capabilities`` is never called.

    Attributes:
        is_polled: ``take_session_events`` is to be called in every step; if not, the
            tier sees to it itself that what it has to say is heard.
    """

    is_polled = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        instance = super().__new__(cls)
        _instances.add(instance)
        return instance

    @property
    @abstractmethod
    def session_capabilities(self) -> frozenset[EditType]:
        """Which edits this tier can carry out."""

    @abstractmethod
    def register_cache(
        self,
        session: SessionKey,
        request_id: str,
        contents: Callable[[], ContextBlocks],
    ) -> None:
        """A request of the session has completed.

        ``contents`` gives its context as it is now, at the cost of its length; it
        must not be called later.
        """

    @abstractmethod
    def offload(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        """Make the contexts survive the loss of their GPU copy.

        Local retention ends only once the answer says that they are safe.
        """

    @abstractmethod
    def prefetch(
        self, operation_id: str, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> OperationHandle:
        """Bring the contexts back into the GPU prefix cache."""

    @abstractmethod
    def evict(
        self,
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
        *,
        purge: bool,
    ) -> OperationHandle:
        """The contexts will not be used again; cancels what is under way.

        ``purge`` asks to delete at once what no other known session shares.
        """

    def edit_unknown(
        self, edit_type: EditType, operation_id: str, session: SessionKey
    ) -> OperationHandle:
        """A prefetch or evict of a session that this engine does not know.

        Another engine may, and the tier may have heard of it. By default it has not.
        """
        return OperationHandle(status=EditStatus.NOT_FOUND)

    def forget(self, session: SessionKey) -> None:  # noqa: B027
        """A client has freed the session, here and wherever else it is known.

        Every one of its contexts is released as well. Nothing to do by default.
        """

    @abstractmethod
    def set_lease(self, session: SessionKey, context_id: int, deadline: float) -> None:
        """The context's lease ends at ``deadline`` now; 0 means it has none."""

    def set_resume(  # noqa: B027
        self, session: SessionKey, context_id: int, resume_at: float
    ) -> None:
        """The context's next request is expected at ``resume_at``; 0: who knows.

        For the order among contexts that are kept alike; nothing to do by default.
        """

    @abstractmethod
    def release(self, session: SessionKey, context_id: int) -> None:
        """The context is no longer known; end what was kept for it."""

    @abstractmethod
    def query_residency(
        self, session: SessionKey, contexts: Sequence[ContextBlocks]
    ) -> Residency:
        """How much of the contexts this tier could bring back."""

    @abstractmethod
    def take_session_events(self) -> Sequence[TierEvent]:
        """Returns and clears what happened since the last call."""


def live_tiers() -> tuple[SupportsSessionAwareKVManagement, ...]:
    """Every instance alive in this process, in no particular order."""
    return tuple(_instances)
