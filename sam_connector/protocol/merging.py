"""One reply from the replies of several engines (data parallelism).

A session lives in the engines that served it: often one, sometimes more, after the
load balancer moved it. Engines that do not know it are left out; of the others,
counts add up, lists are joined, the longest lease and the earliest expected return
count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sam_connector.core.types import BlockCounts, EditResult, EditStatus
from sam_connector.protocol.control import (
    ApplyEdits,
    Command,
    GetOperation,
    ListSessions,
    Reply,
    decode_reply,
    success,
)
from sam_connector.protocol.results import result_from_wire, result_to_wire


def merge_replies(texts: Sequence[object], *, command: Command) -> Reply:
    """Merges what each engine answered to the same command.

    Args:
        texts: one encoded reply from each engine, at least one.
        command: what was asked, which says how results combine.

    Raises:
        ValueError: one of the texts is no reply.
    """
    replies = [decode_reply(text) for text in texts]
    found = [reply for reply in replies if reply.ok and reply.found]
    if not found:
        # "Not found" is established only if every engine was able to look.
        failures = [reply for reply in replies if not reply.ok]
        return (failures or replies)[0]
    results = [reply.result for reply in found]
    if len(results) == 1 or isinstance(command, GetOperation):
        return found[0]
    if isinstance(command, ListSessions):
        return success(_merge_lists(results, command.limit))
    merged = _merge(results)
    if isinstance(command, ApplyEdits):
        merged["results"] = _merge_edit_results([r["results"] for r in results])
    return success(merged)


def _merge_lists(results: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    by_id: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for entry in result["sessions"]:
            by_id.setdefault(entry["session_id"], []).append(entry)
    ids = sorted(by_id)
    more = len(ids) > limit or any(r.get("cursor") is not None for r in results)
    ids = ids[:limit]
    return {
        "sessions": [_merge(by_id[session_id]) for session_id in ids],
        "cursor": ids[-1] if more and ids else None,
    }


def _merge_edit_results(
    per_engine: Sequence[Sequence[dict[str, Any]]],
) -> list[dict[str, Any]]:
    merged = []
    for same_edit in zip(*per_engine, strict=True):
        results = [result_from_wire(wire) for wire in same_edit]
        merged.append(result_to_wire(_merge_edit_result(results)))
    return merged


def _merge_edit_result(results: Sequence[EditResult]) -> EditResult:
    statuses = {result.status for result in results}
    if len(statuses) == 1:
        status = results[0].status
    elif EditStatus.ACCEPTED in statuses:
        status = EditStatus.ACCEPTED
    else:
        status = EditStatus.PARTIAL
    return replace(
        results[0],
        status=status,
        operation_id=_first(result.operation_id for result in results),
        blocks=BlockCounts(
            requested=sum(result.blocks.requested for result in results),
            done=sum(result.blocks.done for result in results),
            already=sum(result.blocks.already for result in results),
            missing=sum(result.blocks.missing for result in results),
            reclaimed=sum(result.blocks.reclaimed for result in results),
        ),
        num_bytes=sum(result.num_bytes for result in results),
        reason=_first(result.reason for result in results),
    )


def _merge(dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for one in dicts for key in one)
    return {
        key: _RULES.get(key, _combine)([one[key] for one in dicts if key in one])
        for key in keys
    }


def _combine(values: Sequence[Any]) -> Any:
    """Adds numbers and mappings, joins lists, otherwise takes the first value."""
    if all(isinstance(value, dict) for value in values):
        return _merge(values)
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if all(isinstance(value, bool) for value in values):
        return any(values)
    if all(isinstance(value, int | float) for value in values):
        return sum(values)
    return _first(values)


def _longest(values: Sequence[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _soonest(values: Sequence[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)


def _union(values: Sequence[Any]) -> Any:
    return list(dict.fromkeys(item for value in values for item in value))


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


_RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "lease_s": _longest,
    "ttl": _longest,
    "expected_resume_s": _soonest,
    "children": _union,
}
