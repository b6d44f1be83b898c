"""Leases of contexts, as the one lease that a session's keys have."""

from __future__ import annotations

from collections.abc import Iterator

from sam_connector.core.types import SessionKey


class SessionLeases:
    """A session is leased for as long as the longest of its contexts."""

    def __init__(self) -> None:
        self._deadlines: dict[SessionKey, dict[int, float]] = {}

    def __iter__(self) -> Iterator[SessionKey]:
        """The sessions with a lease."""
        return iter(self._deadlines)

    def set(self, session: SessionKey, context_id: int, deadline: float) -> float:
        """A context's lease ends at ``deadline``; 0 for none any more.

        Returns:
            When the session's lease ends now; 0 if it has none.
        """
        deadlines = self._deadlines.setdefault(session, {})
        if deadline:
            deadlines[context_id] = deadline
        else:
            deadlines.pop(context_id, None)
        if not deadlines:
            del self._deadlines[session]
        return max(deadlines.values(), default=0.0)

    def forget(self, session: SessionKey) -> None:
        self._deadlines.pop(session, None)

    def clear(self) -> None:
        self._deadlines.clear()
