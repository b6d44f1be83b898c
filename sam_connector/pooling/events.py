"""What the pooling manager's threads find out; exactly one for each call."""

from __future__ import annotations

from dataclasses import dataclass, field

from sam_connector.core.types import SessionKey
from sam_connector.pooling.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Published:
    """A session's manifest was written, or ``reason`` says why not.

    ``ticket`` tells one publication of a session from the next; what is said of
    them is equal without it.
    """

    session: SessionKey
    reason: str | None = None
    ticket: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A manifest was read; with neither manifest nor reason there is none."""

    ticket: int
    manifest: Manifest | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A session is over; ``reason`` says why nobody knows whether there was one."""

    ticket: int
    found: bool = False
    reason: str | None = None


PoolEvent = Published | Recalled | Ended
