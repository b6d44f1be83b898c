"""What the tier asks of the session-aware manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import BlockHash, BlockId, GroupId, SessionKey


class SessionDirectory(Protocol):
    """What the tier asks of the session-aware manager."""

    def contents(self, key: SessionKey, context_id: int) -> ContextBlocks | None:
        """A context's blocks; ``None`` if it is not known any more."""
        ...

    def restore(
        self,
        key: SessionKey,
        context_id: int,
        find: Callable[[GroupId, BlockHash], BlockId],
    ) -> None:
        """Some of a context's blocks are back in the engine's cache."""
        ...

    def contexts_of(self, key: SessionKey) -> Sequence[ContextBlocks]:
        """All of a session's contexts; none if it is not known."""
        ...

    def parent_of(self, key: SessionKey) -> SessionKey | None:
        """The session that this one was spawned by, if it is known."""
        ...

    def adopt(
        self,
        key: SessionKey,
        parent: SessionKey | None,
        contexts: Sequence[Mapping[GroupId, Sequence[BlockHash]]],
        find: Callable[[GroupId, BlockHash], BlockId],
        now: float,
    ) -> None:
        """A session of another engine, some of whose blocks are here now."""
        ...


class NoSessions:
    """The directory of an engine without session hints."""

    def contents(self, key: SessionKey, context_id: int) -> ContextBlocks | None:
        return None

    def restore(self, key: SessionKey, context_id: int, find: Any) -> None:
        return

    def contexts_of(self, key: SessionKey) -> Sequence[ContextBlocks]:
        return ()

    def parent_of(self, key: SessionKey) -> SessionKey | None:
        return None

    def adopt(self, *args: Any) -> None:
        return
