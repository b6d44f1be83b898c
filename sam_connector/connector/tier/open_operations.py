"""The operations under way: who asked for them, and when they go on and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sam_connector.connector.tier.offload import Offload
from sam_connector.connector.tier.operations import Operation, subject_of
from sam_connector.connector.tier.prefetch import Prefetch
from sam_connector.connector.tier.state import TierState
from sam_connector.core.tiers import ContextBlocks, OperationHandle
from sam_connector.core.types import BlockCounts, EditStatus, SessionKey

#: Operations at once; more are rejected.
_MAX_OPERATIONS = 256

#: Clients that one of them answers; more are rejected.
_MAX_ASKERS = 16


class OpenOperations:
    """Operations that have not ended.

    Args:
        state: of the tier.
        on_end: told what became of each, once.
    """

    def __init__(
        self,
        state: TierState,
        on_end: Callable[[Operation, OperationHandle], None],
    ) -> None:
        self._state = state
        self._on_end = on_end
        self._operations: list[Operation] = []

    def __len__(self) -> int:
        return len(self._operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    @property
    def has_work(self) -> bool:
        """Whether a step could bring one of them forward."""
        return any(not operation.waits_for_store for operation in self._operations)

    @property
    def waits_for_store(self) -> bool:
        """Whether one of them waits for the store."""
        return any(operation.waits_for_store for operation in self._operations)

    def open(
        self,
        kind: type[Operation],
        operation_id: str,
        session: SessionKey,
        contexts: Sequence[ContextBlocks],
    ) -> OperationHandle:
        """Somebody asks for an operation; asked for twice it is done once.

        It is begun in the next step: an edit may come with a request that ends while
        the scheduler is at work, when no block may change hands.
        """
        subject = subject_of(kind, session, contexts)
        for known in self._operations:
            if known.subject == subject:
                return _join(known, operation_id)
        if len(self._operations) >= _MAX_OPERATIONS:
            reason = f"{_MAX_OPERATIONS} operations are under way"
            return OperationHandle(status=EditStatus.REJECTED, reason=reason)
        operation = kind(self._state, session, contexts)
        self._operations.append(operation)
        return _join(operation, operation_id)

    def start(self, operation: Operation) -> None:
        """One that nobody asked for; not if too many are under way."""
        is_new = all(known.subject != operation.subject for known in self._operations)
        if is_new and len(self._operations) < _MAX_OPERATIONS:
            self._operations.append(operation)

    def advance(self, max_looks: int) -> None:
        """Goes on with them, as far as the budget for copies allows."""
        # Loads before stores: somebody is about to need them.
        for kind in (Prefetch, Offload):
            for operation in self._operations:
                budget = self._state.budget
                if budget <= 0 or max_looks <= 0:
                    break
                if isinstance(operation, kind) and operation.has_more:
                    max_looks -= operation.advance(budget, max_looks)
        self.settle()

    def settle(self) -> None:
        """Ends those that nothing is left to do for."""
        open_operations = []
        for operation in self._operations:
            if operation.has_more or operation.num_pending:
                open_operations.append(operation)
            else:
                self._on_end(operation, operation.end())
        self._operations = open_operations

    def cancel(self, session: SessionKey, *, offloads_only: bool) -> None:
        """The session was evicted."""
        open_operations = []
        for operation in self._operations:
            is_meant = isinstance(operation, Offload) or not offloads_only
            if operation.session == session and is_meant:
                self._on_end(operation, operation.cancel("cancelled by evict"))
            else:
                open_operations.append(operation)
        self._operations = open_operations

    def cancel_all(self, reason: str) -> None:
        operations, self._operations = self._operations, []
        for operation in operations:
            self._on_end(operation, operation.cancel(reason))

    def abandon(self) -> None:
        """Nobody is told anything any more; what they hold is given back."""
        operations, self._operations = self._operations, []
        for operation in operations:
            operation.has_ended = True
            operation.let_go_of_pins()


def _join(operation: Operation, operation_id: str) -> OperationHandle:
    """All who ask for an operation get the same answer."""
    if len(operation.operation_ids) >= _MAX_ASKERS:
        reason = "the same is under way for others"
        return OperationHandle(status=EditStatus.REJECTED, reason=reason)
    operation.operation_ids.append(operation_id)
    return OperationHandle(
        status=EditStatus.ACCEPTED,
        blocks=BlockCounts(requested=operation.num_requested),
    )
