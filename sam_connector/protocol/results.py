"""``EditResult`` on the wire, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sam_connector.core.types import BlockCounts, EditResult, EditStatus, EditType


def result_to_wire(result: EditResult) -> dict[str, Any]:
    """The result as plain JSON values."""
    return {
        "type": result.type.value,
        "status": result.status.value,
        "operation_id": result.operation_id,
        "blocks": {
            "requested": result.blocks.requested,
            "done": result.blocks.done,
            "already": result.blocks.already,
            "missing": result.blocks.missing,
            "reclaimed": result.blocks.reclaimed,
        },
        "bytes": result.num_bytes,
        "reason": result.reason,
    }


def result_from_wire(wire: Mapping[str, Any]) -> EditResult:
    """The inverse of ``result_to_wire``.

    Raises:
        KeyError: a part is missing.
        ValueError: a type or status is unknown.
    """
    blocks = wire["blocks"]
    return EditResult(
        type=EditType(wire["type"]),
        status=EditStatus(wire["status"]),
        operation_id=wire["operation_id"],
        blocks=BlockCounts(
            requested=blocks["requested"],
            done=blocks["done"],
            already=blocks["already"],
            missing=blocks["missing"],
            reclaimed=blocks["reclaimed"],
        ),
        num_bytes=wire["bytes"],
        reason=wire["reason"],
    )
