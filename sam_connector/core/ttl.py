"""Leases: how long a context is protected, and when it is forgotten.

And expectations: until when a context's place among others follows what its client
has said, and no longer.

The RFC keys its timers by ``(block_id, session_id)``. Here one entry stands for
all blocks of a context, with the same outcome: the end of one session's lease never
shortens that of another, because a block's deadline is the latest of its holders'.
"""

from __future__ import annotations

from collections.abc import Callable

from sam_connector.core.session_index import Context
from sam_connector.core.timer_wheel import TimerWheel
from sam_connector.errors import IntegrityError

#: Resolution of leases in seconds.
TICK_S = 1.0
#: Few expectations are further ahead than that; a round more costs them little.
_NUM_RESUME_SLOTS = 600


def _ignore(context: Context) -> None:
    """Default of ``LeaseTable.on_change``."""


class ResumeTable:
    """Contexts whose next request is expected at a time that is still ahead.

    Args:
        now: the present, monotonic seconds.
    """

    def __init__(self, *, now: float) -> None:
        self._wheel: TimerWheel[Context] = TimerWheel(
            num_slots=_NUM_RESUME_SLOTS, tick_s=TICK_S, now=now
        )

    def __len__(self) -> int:
        return len(self._wheel)

    def expect(self, context: Context, resume_at: float, now: float) -> None:
        if not self._wheel:
            self._wheel.advance(now, 0)  # not driven while it is empty
        self._wheel.register(context, resume_at)

    def forget(self, context: Context) -> None:
        self._wheel.remove(context)

    def take_overdue(self, now: float, limit: int) -> list[Context]:
        """Contexts that have not come back in time, at most ``limit``."""
        return self._wheel.advance(now, limit) if self._wheel else []

    def check_integrity(self, contexts: list[Context]) -> None:
        self._wheel.check_integrity()
        expected = [context for context in contexts if context.resume_at]
        if len(expected) != len(self._wheel) or not all(
            context in self._wheel for context in expected
        ):
            raise IntegrityError("wheel and expectations disagree")


class LeaseTable:
    """Deadlines of contexts; every known context has exactly one.

    Args:
        idle_ttl_s: how long a context without a lease is remembered.
        now: the present, monotonic seconds.

    Attributes:
        resumes: when contexts are expected back.
        on_change: called with a context whose deadline is another now.
    """

    def __init__(self, *, idle_ttl_s: float, now: float) -> None:
        self._idle_ttl_s = idle_ttl_s
        self.resumes = ResumeTable(now=now)
        self.on_change: Callable[[Context], None] = _ignore
        self._wheel: TimerWheel[Context] = TimerWheel(tick_s=TICK_S, now=now)

    def __len__(self) -> int:
        return len(self._wheel)

    def grant(self, context: Context, deadline: float) -> None:
        """Leases ``context`` until ``deadline``, later or earlier than before."""
        self._wheel.register(context, deadline)
        context.deadline = deadline
        self.on_change(context)

    def end(self, context: Context, now: float) -> None:
        """Ends the lease; the context is remembered for the idle time."""
        was_leased, context.deadline = context.deadline, 0.0
        self._wheel.register(context, now + self._idle_ttl_s)
        if was_leased:
            self.on_change(context)

    def forget(self, context: Context) -> None:
        context.deadline = 0.0
        self._wheel.remove(context)
        self.resumes.forget(context)

    def take_expired(self, now: float, limit: int) -> list[Context]:
        """Contexts whose lease or idle time is over, at most ``limit``."""
        return self._wheel.advance(now, limit)

    def check_integrity(self, contexts: list[Context]) -> None:
        self._wheel.check_integrity()
        if len(contexts) != len(self._wheel) or not all(
            context in self._wheel for context in contexts
        ):
            raise IntegrityError("wheel and contexts disagree")
        self.resumes.check_integrity(contexts)
