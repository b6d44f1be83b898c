"""The sessions and contexts, for a tier in the engine's process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from sam_connector.core.contexts import Chain, ContextBook, LazyBlockIds
from sam_connector.core.session_index import Context
from sam_connector.core.tiers import ContextBlocks
from sam_connector.core.types import BlockHash, BlockId, GroupId, SessionKey

#: Where the engine has a block, 0 for nowhere.
Find = Callable[[GroupId, BlockHash], BlockId]


class Directory:
    """What a tier may ask of contexts, and tell of them.

    Args:
        book: the contexts.
    """

    def __init__(self, book: ContextBook) -> None:
        self._book = book

    def contents(self, key: SessionKey, context_id: int) -> ContextBlocks | None:
        """A context's blocks; ``None`` if it is not known any more."""
        context = self._context(key, context_id)
        return None if context is None else self._book.blocks_of(context)

    def contexts_of(self, key: SessionKey) -> list[ContextBlocks]:
        """All of a session's contexts, the one used last at the end."""
        session = self._book.sessions.get(key)
        contexts = () if session is None else session.contexts
        return [self._book.blocks_of(context) for context in contexts]

    def parent_of(self, key: SessionKey) -> SessionKey | None:
        """The session that spawned this one, if it is known."""
        return self._book.tree.parent(key)

    def restore(self, key: SessionKey, context_id: int, find: Find) -> None:
        """Some of a context's blocks are back in the engine's cache."""
        context = self._context(key, context_id)
        if context is None:
            return
        index = self._book.index
        blocks = {
            group_id: index.hashes(context, group_id) for group_id in context.leaves
        }
        self._book.extend(context, _chains(blocks, find))

    def adopt(
        self,
        key: SessionKey,
        parent: SessionKey | None,
        contexts: Sequence[Mapping[GroupId, Sequence[BlockHash]]],
        find: Find,
        now: float,
    ) -> None:
        """A session that another engine knew, and of which blocks are here now.

        What this engine has learned of it meanwhile is never touched.

        Args:
            key: the session.
            parent: the session that spawned it.
            contexts: content by group; only what is in the engine's cache.
            find: where that is.
            now: monotonic seconds.
        """
        if not contexts or self._book.sessions.get(key) is not None:
            return
        session = self._book.register(key)
        if session is None:
            return
        if parent is not None:
            self._book.tree.link(key, parent)
        for blocks in contexts[-self._book.limits.max_contexts :]:
            size = max(map(len, blocks.values()), default=0)
            context = self._book.open(session, size, now)
            if context is not None:
                self._book.extend(context, _chains(blocks, find))
        self._book.drop_if_empty(session)

    def _context(self, key: SessionKey, context_id: int) -> Context | None:
        session = self._book.sessions.get(key)
        contexts = () if session is None else session.contexts
        return next((c for c in contexts if c.context_id == context_id), None)


def _chains(
    blocks: Mapping[GroupId, Sequence[BlockHash]], find: Find
) -> dict[GroupId, Chain]:
    return {
        group_id: Chain(
            hashes=hashes,
            block_ids=LazyBlockIds(hashes, functools.partial(find, group_id)),
        )
        for group_id, hashes in blocks.items()
    }
