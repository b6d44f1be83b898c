"""What the pooling manager has to say, some time after it was asked."""

from __future__ import annotations

from dataclasses import dataclass

from sam_connector.core.types import SessionKey
from sam_connector.pooling.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Published:
    """A session's manifest, as last handed over, is in the store.

    Attributes:
        session: whose; one event may stand for several calls of ``publish``.
        reason: why that is not so, or not all that it names is there; ``None`` if all
            is confirmed.
    """

    session: SessionKey
    reason: str | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Recalled:
    """A session's manifest; without manifest and reason there is none.

    Attributes:
        ticket: what ``recall`` returned.
        session: whose.
        manifest: what the store says of it.
        reason: why that cannot be known.
    """

    ticket: int
    session: SessionKey
    manifest: Manifest | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A session is over in the store.

    Attributes:
        ticket: what ``end`` returned.
        found: whether the store knew of it.
        reason: why it may not be over.
    """

    ticket: int
    found: bool = False
    reason: str | None = None


PoolEvent = Published | Recalled | Ended
