"""Results survive the way to the wire and back."""

from __future__ import annotations

import json

import pytest

from sam_connector.core.types import BlockCounts, EditResult, EditStatus, EditType
from sam_connector.protocol.results import result_from_wire, result_to_wire

RESULT = EditResult(
    type=EditType.PREFETCH,
    status=EditStatus.PARTIAL,
    operation_id="op-1",
    blocks=BlockCounts(requested=9, done=4, already=3, missing=2, reclaimed=1),
    num_bytes=4096,
    reason="store is down",
)


def test_wire_form() -> None:
    assert result_to_wire(RESULT) == {
        "type": "prefetch",
        "status": "partial",
        "operation_id": "op-1",
        "blocks": {
            "requested": 9,
            "done": 4,
            "already": 3,
            "missing": 2,
            "reclaimed": 1,
        },
        "bytes": 4096,
        "reason": "store is down",
    }


@pytest.mark.parametrize("status", EditStatus)
@pytest.mark.parametrize("kind", EditType)
def test_round_trip(kind: EditType, status: EditStatus) -> None:
    result = EditResult(type=kind, status=status)
    assert result_from_wire(json.loads(json.dumps(result_to_wire(result)))) == result


def test_round_trip_with_every_part() -> None:
    assert result_from_wire(result_to_wire(RESULT)) == RESULT
