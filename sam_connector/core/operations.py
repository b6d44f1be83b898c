"""Asynchronous operations, remembered so that a client can ask for their outcome."""

from __future__ import annotations

from collections import OrderedDict

from sam_connector.core.types import EditResult, EditStatus, SessionKey


class OperationTable:
    """The latest operations by id; the oldest are forgotten first.

    Args:
        max_operations: most operations remembered, finished ones included.
        prefix: of every id; tells the engines of one server apart.
    """

    def __init__(self, max_operations: int, prefix: str = "op") -> None:
        self._prefix = prefix
        self._max_operations = max_operations
        self._num_started = 0
        self._open: set[str] = set()
        self._operations: OrderedDict[str, tuple[SessionKey, EditResult]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def num_open(self) -> int:
        """Operations that have not ended."""
        return len(self._open)

    def new_id(self) -> str:
        self._num_started += 1
        return f"{self._prefix}-{self._num_started}"

    def record(self, session: SessionKey, result: EditResult) -> None:
        """Files the first or a later state of an operation under its id."""
        assert result.operation_id is not None
        self._operations[result.operation_id] = (session, result)
        if result.status is EditStatus.ACCEPTED:
            self._open.add(result.operation_id)
        else:
            self._open.discard(result.operation_id)
        while len(self._operations) > self._max_operations:
            forgotten, _ = self._operations.popitem(last=False)
            self._open.discard(forgotten)

    def get(self, operation_id: str) -> tuple[SessionKey, EditResult] | None:
        return self._operations.get(operation_id)

    def open_of(self, session: SessionKey) -> list[EditResult]:
        """The session's operations that have not ended."""
        return [
            result
            for key, result in self._operations.values()
            if key == session and result.status is EditStatus.ACCEPTED
        ]
