"""Asynchronous operations, remembered so that a client can ask for their outcome."""

from __future__ import annotations

from collections import OrderedDict

from sam_connector.core.types import EditResult, EditStatus, SessionKey


class OperationTable:
    """The latest operations by id; of those that have ended, the oldest go first.

    Args:
        max_operations: most operations remembered, finished ones included.
        prefix: of every id; tells the engines of one server apart.
    """

    def __init__(self, max_operations: int, prefix: str = "op") -> None:
        self._prefix = prefix
        self._max_operations = max_operations
        self._num_started = 0
        self._open: OrderedDict[str, tuple[SessionKey, EditResult]] = OrderedDict()
        self._ended: OrderedDict[str, tuple[SessionKey, EditResult]] = OrderedDict()
        self._open_by_session: dict[SessionKey, dict[str, EditResult]] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    @property
    def num_open(self) -> int:
        """Operations that have not ended."""
        return len(self._open)

    def new_id(self) -> str:
        self._num_started += 1
        return f"{self._prefix}-{self._num_started}"

    def record(self, session: SessionKey, result: EditResult) -> None:
        """Files the first or a later state of an operation under its id."""
        operation_id = result.operation_id
        assert operation_id is not None
        if result.status is EditStatus.ACCEPTED:
            self._open[operation_id] = session, result
            self._open_by_session.setdefault(session, {})[operation_id] = result
        else:
            self._close(operation_id)
            self._ended[operation_id] = session, result
        while len(self) > self._max_operations:
            if self._ended:
                self._ended.popitem(last=False)
            else:
                self._close(next(iter(self._open)))

    def get(self, operation_id: str) -> tuple[SessionKey, EditResult] | None:
        return self._open.get(operation_id) or self._ended.get(operation_id)

    def open_of(self, session: SessionKey) -> list[EditResult]:
        """The session's operations that have not ended."""
        return list(self._open_by_session.get(session, {}).values())

    def _close(self, operation_id: str) -> None:
        known = self._open.pop(operation_id, None)
        if known is not None:
            session, _ = known
            own = self._open_by_session[session]
            del own[operation_id]
            if not own:
                del self._open_by_session[session]
