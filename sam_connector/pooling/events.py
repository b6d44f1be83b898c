"""What the pooling manager's threads find out; exactly one for each call."""

from __future__ import annotations

from dataclasses import dataclass

from sam_connector.core.types import SessionKey
from sam_connector.pooling.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Published:
    """A session's manifest was written, or ``reason`` says why not."""

    session: SessionKey
    reason: str | None = None


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
