"""Hints that must be refused, each with the field that the refusal names."""

from __future__ import annotations

import math

import pytest

from sam_connector.protocol.agent_hint import MAX_BLOCK_INDEX

EVICT = {"type": "evict"}


def hint(**parts: object) -> dict[str, object]:
    return {"session_id": "s", **parts}


def ttl(value: object) -> dict[str, object]:
    return hint(cache_control={"ttl": value})


def offset(value: object) -> dict[str, object]:
    return hint(cache_control={"block_offset": value})


def edits(*items: object) -> dict[str, object]:
    return hint(context_management={"edits": list(items)})


def ranged(start: object, end: object) -> dict[str, object]:
    return edits({"type": "evict", "block_start": start, "block_end": end})


INVALID_HINTS = [
    pytest.param([], "agent_hint", id="list"),
    pytest.param("x", "agent_hint", id="text"),
    pytest.param(hint(ttl=5), "agent_hint.ttl", id="unknown"),
    pytest.param(
        hint(cache_control={"ttl_s": 5}), "agent_hint.cache_control.ttl_s", id="typo"
    ),
    pytest.param(
        hint(context_management={"edit": []}),
        "agent_hint.context_management.edit",
        id="typo-in-management",
    ),
    pytest.param(
        edits(EVICT | {"start": 0}),
        "agent_hint.context_management.edits.0.start",
        id="typo-in-edit",
    ),
    pytest.param({"session_id": ""}, "agent_hint.session_id", id="empty-id"),
    pytest.param({"session_id": "x" * 257}, "agent_hint.session_id", id="long-id"),
    pytest.param({"session_id": "x" * 4096}, "agent_hint.session_id", id="p12-4k-id"),
    pytest.param({"session_id": "a\nb"}, "agent_hint.session_id", id="newline-id"),
    pytest.param({"session_id": "a\u200bb"}, "agent_hint.session_id", id="format-id"),
    pytest.param({"session_id": "\ud800"}, "agent_hint.session_id", id="p07-surrogate"),
    pytest.param({"session_id": 7}, "agent_hint.session_id", id="number-id"),
    pytest.param(
        hint(parent_session_id="\ud800"),
        "agent_hint.parent_session_id",
        id="p07-parent-surrogate",
    ),
    pytest.param(
        hint(parent_session_id=""), "agent_hint.parent_session_id", id="empty-parent"
    ),
    pytest.param(
        hint(parent_session_id="s"), "agent_hint.parent_session_id", id="own-parent"
    ),
    pytest.param(hint(cache_control=[]), "agent_hint.cache_control", id="control-list"),
    pytest.param(
        hint(cache_control={"type": "persistent"}),
        "agent_hint.cache_control.type",
        id="control-type",
    ),
    *(
        pytest.param(ttl(value), "agent_hint.cache_control.ttl", id=f"n01-ttl-{value}")
        for value in (
            3600.0001,
            1e18,
            -1,
            -1e-9,
            math.nan,
            math.inf,
            -math.inf,
            "300",
            True,
            None,
        )
    ),
    pytest.param(ttl(10**400), "agent_hint.cache_control.ttl", id="n01-ttl-huge"),
    *(
        pytest.param(
            hint(expected_resume_s=value),
            "agent_hint.expected_resume_s",
            id=f"resume-{value}",
        )
        for value in (
            3600.0001,
            1e18,
            -1,
            -1e-9,
            math.nan,
            math.inf,
            -math.inf,
            "30",
            True,
            [],
        )
    ),
    pytest.param(
        hint(expected_resume_s=10**400),
        "agent_hint.expected_resume_s",
        id="resume-huge",
    ),
    pytest.param(
        hint(cache_control={"expected_resume_s": 5}),
        "agent_hint.cache_control.expected_resume_s",
        id="resume-misplaced",
    ),
    pytest.param(
        {"expected_resume_s": 5}, "agent_hint.session_id", id="resume-of-nobody"
    ),
    *(
        pytest.param(
            offset(value), "agent_hint.cache_control.block_offset", id=f"offset-{value}"
        )
        for value in (-1, 1.0, "1", True, MAX_BLOCK_INDEX + 1)
    ),
    pytest.param(
        hint(context_management={"manage_request": "yes"}),
        "agent_hint.context_management.manage_request",
        id="manage-text",
    ),
    pytest.param(
        hint(context_management={"edits": {}}),
        "agent_hint.context_management.edits",
        id="edits-object",
    ),
    pytest.param(
        edits(*[EVICT] * 17), "agent_hint.context_management.edits", id="17-edits"
    ),
    pytest.param(
        edits(EVICT, {}), "agent_hint.context_management.edits.1.type", id="no-type"
    ),
    pytest.param(
        edits({"type": "delete"}),
        "agent_hint.context_management.edits.0.type",
        id="edit-type",
    ),
    pytest.param(
        ranged(1, None), "agent_hint.context_management.edits.0.block_end", id="no-end"
    ),
    pytest.param(
        ranged(None, 1),
        "agent_hint.context_management.edits.0.block_start",
        id="no-start",
    ),
    pytest.param(
        ranged(3, 3), "agent_hint.context_management.edits.0.block_end", id="empty"
    ),
    pytest.param(
        ranged(4, 3), "agent_hint.context_management.edits.0.block_end", id="reversed"
    ),
    pytest.param(
        ranged(-1, 3),
        "agent_hint.context_management.edits.0.block_start",
        id="negative-start",
    ),
    pytest.param(
        ranged(0, 2.5), "agent_hint.context_management.edits.0.block_end", id="half"
    ),
    pytest.param(
        {"cache_control": {"ttl": 1}}, "agent_hint.session_id", id="ttl-of-nothing"
    ),
    pytest.param(
        {"context_management": {"edits": [EVICT]}},
        "agent_hint.session_id",
        id="edit-of-nothing",
    ),
    pytest.param(
        {"context_management": {"manage_request": True}},
        "agent_hint.session_id",
        id="manage-nothing",
    ),
    pytest.param(
        {"parent_session_id": "p"}, "agent_hint.session_id", id="parent-of-nothing"
    ),
]
