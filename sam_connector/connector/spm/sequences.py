"""Token sequences of sessions, so that a connector can be asked for them again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sam_connector.core.types import BlockHash, SessionKey
from sam_connector.errors import IntegrityError


@dataclass(eq=False, slots=True)
class TokenSequence:
    """Full blocks of one conversation. Only ever grows at its end.

    Attributes:
        block_size: tokens of a block.
        hashes: content of its blocks.
        tokens: of its blocks, and of no more.
        lora_request: the adapter it was computed with.
        cache_salt: what sets its hashes apart.
    """

    block_size: int
    hashes: list[BlockHash] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("I"))
    lora_request: Any = None
    cache_salt: str | None = None

    def __len__(self) -> int:
        """Blocks."""
        return len(self.hashes)

    def covers(self, num_blocks: int, leaf: BlockHash) -> bool:
        """Whether its first blocks are those that end in ``leaf``.

        A block's hash stands for everything before it as well.
        """
        return 0 < num_blocks <= len(self) and self.hashes[num_blocks - 1] == leaf

    def extend(self, hashes: Sequence[BlockHash], tokens: Sequence[int]) -> int:
        """Grows to ``hashes``, which begin with its own; returns tokens added."""
        first, size = len(self), self.block_size
        self.hashes.extend(hashes[first:])
        added = array("I", tokens[first * size : len(hashes) * size])
        self.tokens.extend(added)
        return len(added)


class SequenceBook:
    """The sequences of sessions, those of the sessions used last.

    Args:
        max_tokens: over all sessions.
        max_contexts: per session.
    """

    def __init__(self, *, max_tokens: int, max_contexts: int) -> None:
        self._max_tokens = max_tokens
        self._max_contexts = max_contexts
        self._sessions: OrderedDict[SessionKey, list[TokenSequence]] = OrderedDict()
        self.num_tokens = 0

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> list[SessionKey]:
        """The one used last at the end."""
        return list(self._sessions)

    def of(self, session: SessionKey) -> Sequence[TokenSequence]:
        """The one used last at the end."""
        return self._sessions.get(session, ())

    def find(
        self, session: SessionKey, num_blocks: int, leaf: BlockHash
    ) -> TokenSequence | None:
        for sequence in reversed(self.of(session)):
            if sequence.covers(num_blocks, leaf):
                return sequence
        return None

    def note(
        self, session: SessionKey, seen: TokenSequence, num_blocks: int
    ) -> list[SessionKey]:
        """The session's conversation has got as far as ``num_blocks`` of ``seen``.

        Returns:
            Sessions that were forgotten to make room.
        """
        known = self._sessions.setdefault(session, [])
        self._sessions.move_to_end(session)
        hashes = seen.hashes[:num_blocks]
        grown = next((s for s in known if _is_prefix(s, seen, num_blocks)), None)
        if grown is not None:
            known.remove(grown)
        else:
            grown = TokenSequence(
                seen.block_size,
                lora_request=seen.lora_request,
                cache_salt=seen.cache_salt,
            )
            if any(s.covers(num_blocks, hashes[-1]) for s in known):
                return []  # a repetition of something longer
        known.append(grown)
        self.num_tokens += grown.extend(hashes, seen.tokens)
        if len(known) > self._max_contexts:
            self.num_tokens -= len(known.pop(0).tokens)
        return self._make_room()

    def remove(self, session: SessionKey) -> None:
        for sequence in self._sessions.pop(session, ()):
            self.num_tokens -= len(sequence.tokens)

    def clear(self) -> None:
        self._sessions.clear()
        self.num_tokens = 0

    def check_integrity(self) -> None:
        """Raises ``IntegrityError`` if the count of tokens is wrong."""
        counted = sum(len(s.tokens) for known in self._sessions.values() for s in known)
        if counted != self.num_tokens:
            raise IntegrityError(f"{counted} tokens are remembered, {self.num_tokens}")
        for known in self._sessions.values():
            for sequence in known:
                if len(sequence.tokens) != len(sequence) * sequence.block_size:
                    raise IntegrityError("tokens and blocks of a sequence disagree")

    def _make_room(self) -> list[SessionKey]:
        forgotten = []
        while self.num_tokens > self._max_tokens and self._sessions:
            oldest = next(iter(self._sessions))
            self.remove(oldest)
            forgotten.append(oldest)
        return forgotten


def _is_prefix(known: TokenSequence, seen: TokenSequence, num_blocks: int) -> bool:
    return len(known) <= num_blocks and seen.covers(len(known), known.hashes[-1])
