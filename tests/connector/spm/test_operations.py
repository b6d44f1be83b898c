"""What a client is told of an operation that has ended."""

from __future__ import annotations

from collections import deque

import pytest

from sam_connector.connector.spm.operations import Kind, Operation, Target
from sam_connector.core.types import EditStatus
from tests.connector.spm.test_sequences import key


@pytest.mark.parametrize(
    ("done", "already", "status"),
    [
        (4, 0, EditStatus.COMPLETED),
        (1, 3, EditStatus.COMPLETED),
        (1, 0, EditStatus.PARTIAL),
        (0, 1, EditStatus.PARTIAL),
        (0, 0, EditStatus.REJECTED),
    ],
)
def test_the_status_follows_from_the_blocks(
    done: int, already: int, status: EditStatus
) -> None:
    operation = Operation(
        operation_id="op",
        kind=Kind.PREFETCH,
        session=key("s"),
        targets=deque([Target(None, 4, None)]),
        deadline=0.0,
        num_requested=4,
        num_done=done,
        num_already=already,
        block_bytes=10,
    )
    operation.skip("first")
    operation.reasons.append("second")
    handle = operation.outcome()
    assert handle.status is status
    assert handle.blocks.missing == 4 - done - already
    assert handle.num_bytes == 10 * done
    assert handle.reason == (None if status is EditStatus.COMPLETED else "first")
    operation.is_cancelled = True
    assert operation.outcome().status is EditStatus.REJECTED
