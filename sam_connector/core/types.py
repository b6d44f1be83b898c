"""Words shared by every layer: identities, hints, edits and their results.

Look-alike values get distinct types so that a type checker tells them apart:
a ``BlockId`` names a physical slot and is reused for other content, a
``BlockHash`` names content and never changes meaning, a *block index* is a
position inside one session's context.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType

#: Physical slot in the engine's block pool; 0 is the null block and means
#: "no resident copy" wherever this package stores one.
BlockId = NewType("BlockId", int)

#: Content identity of one block in one KV cache group (hash packed with group id).
BlockHash = NewType("BlockHash", bytes)

#: Which layers share a block table; hybrid models have several groups.
GroupId = NewType("GroupId", int)

NULL_BLOCK_ID = BlockId(0)


class SessionKey(NamedTuple):
    """Owner of contexts. Two tenants may use the same ``session_id`` freely."""

    tenant: str
    session_id: str


class Zone(enum.IntEnum):
    """Allocation order of free blocks (RFC section 6): A first, C last."""

    A = 0  # free and unclaimed
    B = 1  # held by a session, no live deadline
    C = 2  # held under a live deadline


class EditType(enum.StrEnum):
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    EVICT = "evict"


class EditStatus(enum.StrEnum):
    COMPLETED = "completed"
    ACCEPTED = "accepted"
    PARTIAL = "partial"
    UNSUPPORTED = "unsupported"
    NOT_FOUND = "not_found"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One requested change to a session's cached context.

    ``block_start``/``block_end`` are logical indices into the context, half-open;
    both ``None`` target the whole context. ``purge`` asks an evict to delete at once
    what no other session shares.
    """

    type: EditType
    block_start: int | None = None
    block_end: int | None = None
    purge: bool = False

    @property
    def is_ranged(self) -> bool:
        return self.block_start is not None or self.block_end is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """What became of the blocks an edit is about.

    Attributes:
        requested: blocks the edit names.
        done: changed by it; of an offload: published, copied to the tier.
        already: as asked for before.
        missing: not so in the end: found in no cache, no room, or a copy that failed.
        reclaimed: of an offload: engine blocks that are ordinary again since the
            copy is safe. Blocks that other sessions hold are not.
    """

    requested: int = 0
    done: int = 0
    already: int = 0
    missing: int = 0
    reclaimed: int = 0


NO_BLOCKS = BlockCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class EditResult:
    """Outcome of one edit; expected outcomes are values, never exceptions."""

    type: EditType
    status: EditStatus
    operation_id: str | None = None
    blocks: BlockCounts = NO_BLOCKS
    num_bytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHint:
    """What one request says about its session, validated and lowered.

    Attributes:
        ttl_s: requested retention in seconds from completion; ``None`` asks for
            none, 0 ends what is held.
        protect_blocks: protect only logical blocks ``[0, protect_blocks)``;
            ``None`` protects the whole context.
        edits: applied when the request completes.
        expected_resume_s: when the session's next request is likely to come, in
            seconds from completion; ``None`` if nobody can tell. Orders contexts that
            are retained alike, and nothing else.
    """

    session: SessionKey
    parent: SessionKey | None = None
    ttl_s: float | None = None
    protect_blocks: int | None = None
    edits: tuple[Edit, ...] = ()
    expected_resume_s: float | None = None
