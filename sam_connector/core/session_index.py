"""What is remembered about a session: its contexts, in order of last use.

An agent makes side calls under the id of its main conversation (a title, a
summary, a search), so one session keeps a few *contexts*, each one append-only
run of blocks per KV cache group.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sam_connector.core.retention import Segment
from sam_connector.core.types import GroupId, SessionKey
from sam_connector.errors import IntegrityError


@dataclass(eq=False, slots=True, kw_only=True)
class Context:
    """One conversation of a session.

    Attributes:
        context_id: tells it apart from every other context of the engine.
        deadline: end of its lease, monotonic seconds; 0 for none.
        resume_at: when its next request is expected, monotonic seconds; 0 if nobody
            has said, or that time has passed.
        protect_blocks: blocks the lease covers from the start; ``None`` for all.
        last_used: when a request last used it, monotonic seconds.
        newest_request: sequence number of the newest request admitted to it.
        num_active: its requests that run.
    """

    session: Session
    context_id: int = field(default_factory=itertools.count(1).__next__)
    leaves: dict[GroupId, Segment] = field(default_factory=dict)
    deadline: float = 0.0
    resume_at: float = 0.0
    protect_blocks: int | None = None
    last_used: float = 0.0
    newest_request: int = 0
    num_active: int = 0

    @property
    def num_blocks(self) -> int:
        """Its length: logical blocks of its longest KV cache group."""
        return max((leaf.end for leaf in self.leaves.values()), default=0)

    @property
    def siblings(self) -> list[Context]:
        return self.session.contexts

    @property
    def is_live(self) -> bool:
        """Whether the session still has it."""
        return self in self.session.contexts


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """All that is known about ``(tenant, session_id)``.

    Attributes:
        contexts: its conversations, least recently used first.
        num_active: requests of the session that run.
        epoch: raised by evict, so that a request from before it restores nothing.
    """

    key: SessionKey
    contexts: list[Context] = field(default_factory=list)
    num_active: int = 0
    epoch: int = 0

    @property
    def is_leased(self) -> bool:
        return any(context.deadline > 0.0 for context in self.contexts)


class SessionIndex:
    """Sessions by key; the ones without a lease are the first to be dropped."""

    def __init__(self) -> None:
        self._leased: OrderedDict[SessionKey, Session] = OrderedDict()
        self._unleased: OrderedDict[SessionKey, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leased) + len(self._unleased)

    def __iter__(self) -> Iterator[Session]:
        yield from self._unleased.values()
        yield from self._leased.values()

    def get(self, key: SessionKey) -> Session | None:
        return self._leased.get(key) or self._unleased.get(key)

    def add(self, key: SessionKey) -> Session:
        session = self._unleased[key] = Session(key=key)
        return session

    def remove(self, session: Session) -> None:
        self._leased.pop(session.key, None)
        self._unleased.pop(session.key, None)

    def touch(self, session: Session) -> None:
        """Files the session as just used, under leased or not."""
        self.remove(session)
        queue = self._leased if session.is_leased else self._unleased
        queue[session.key] = session

    def victim(self) -> Session | None:
        """The session to drop first: the oldest that has no lease and is idle."""
        for session in self:
            if not session.num_active:
                return session
        return None

    def check_integrity(self) -> None:
        if self._leased.keys() & self._unleased.keys():
            raise IntegrityError("a session is filed twice")
        for session in self:
            if (session.key in self._leased) != session.is_leased:
                raise IntegrityError(f"{session.key} is misfiled")
