"""One reply out of several engines' replies."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.core.types import (
    BlockCounts,
    Edit,
    EditResult,
    EditStatus,
    EditType,
)
from sam_connector.protocol.control import (
    ApplyEdits,
    FailureCode,
    GetOperation,
    GetSession,
    GetStats,
    ListSessions,
    Reply,
    SetLease,
    failure,
    success,
)
from sam_connector.protocol.merging import merge_replies
from sam_connector.protocol.results import result_to_wire

GET = GetSession(tenant="", session_id="s")
NOT_FOUND = success(None, found=False)
ASLEEP = failure("rejected", "asleep")


def merged(command: Any, *replies: Reply) -> Reply:
    return merge_replies([reply.encode() for reply in replies], command=command)


def session(**parts: Any) -> dict[str, Any]:
    return {
        "session_id": "s",
        "parent": None,
        "children": [],
        "contexts": [],
        "blocks": {"gpu": 1, "host": 0, "store": 0},
        "lease_s": None,
        "running_requests": 1,
        "operations": [],
    } | parts


def test_one_engine_s_reply_is_the_reply() -> None:
    for reply in (success({"a": 1}), NOT_FOUND, ASLEEP):
        assert merged(GET, reply) == reply


def test_the_engine_that_knows_the_session_answers() -> None:
    reply = merged(GET, NOT_FOUND, success(session()), ASLEEP)
    assert reply == success(session())


def test_unknown_everywhere_is_not_found() -> None:
    assert merged(GET, NOT_FOUND, NOT_FOUND) == NOT_FOUND


def test_not_found_needs_every_engine() -> None:
    assert merged(GET, NOT_FOUND, ASLEEP).code is FailureCode.REJECTED


def test_a_session_in_two_engines_is_added_up() -> None:
    first = session(
        children=["a"],
        contexts=[{"num_blocks": 1}],
        lease_s=5.0,
        expected_resume_s=3.0,
    )
    second = session(
        parent="p",
        children=["a", "b"],
        contexts=[{"num_blocks": 2}],
        lease_s=9.0,
        expected_resume_s=7.0,
    )
    assert merged(GET, success(first), success(second)).result == session(
        parent="p",
        children=["a", "b"],
        contexts=[{"num_blocks": 1}, {"num_blocks": 2}],
        blocks={"gpu": 2, "host": 0, "store": 0},
        lease_s=9.0,
        expected_resume_s=3.0,
        running_requests=2,
    )


def test_an_engine_that_expects_nothing_hides_nothing() -> None:
    first, second = session(expected_resume_s=None), session(expected_resume_s=7.0)
    merged_reply = merged(GET, success(first), success(second))
    assert merged_reply.result["expected_resume_s"] == 7.0


def test_a_lease_is_not_added_up() -> None:
    command = SetLease(tenant="", session_id="s", ttl=5)
    reply = success({"session_id": "s", "ttl": 5.0})
    assert merged(command, reply, reply) == reply
    reply = success({"session_id": "s", "ttl": 5.0, "expected_resume_s": 3.0})
    assert merged(command, reply, reply) == reply


def test_lists_are_merged_ordered_and_limited_again() -> None:
    def page(*ids: str, cursor: str | None) -> Reply:
        sessions = [session(session_id=each) for each in ids]
        return success({"sessions": sessions, "cursor": cursor})

    reply = merged(
        ListSessions(tenant="", limit=3),
        page("a", "c", "e", cursor="e"),
        page("b", "c", cursor=None),
    )
    assert [one["session_id"] for one in reply.result["sessions"]] == ["a", "b", "c"]
    assert reply.result["cursor"] == "c"
    assert reply.result["sessions"][2]["running_requests"] == 2


def test_pages_cover_every_session_once() -> None:
    engines = [["a", "c", "e", "g"], ["b", "c", "d", "h"], []]

    def ask(cursor: str | None) -> Reply:
        replies = []
        for ids in engines:
            rest = [each for each in ids if cursor is None or each > cursor]
            page = rest[:2]
            more = page[-1] if len(rest) > 2 else None
            sessions = [session(session_id=each) for each in page]
            replies.append(success({"sessions": sessions, "cursor": more}))
        return merged(ListSessions(tenant="", limit=2, cursor=cursor), *replies)

    seen, cursor = [], None
    while True:
        result = ask(cursor).result
        seen += [one["session_id"] for one in result["sessions"]]
        cursor = result["cursor"]
        if cursor is None:
            break
    assert seen == ["a", "b", "c", "d", "e", "g", "h"]


def test_counters_are_summed_and_switches_joined() -> None:
    one = {"sessions": 1, "edits": {"evict/completed": 2}, "paused": False}
    two = {"sessions": 4, "edits": {"offload/rejected": 1}, "paused": True}
    assert merged(GetStats(), success(one), success(two)).result == {
        "sessions": 5,
        "edits": {"evict/completed": 2, "offload/rejected": 1},
        "paused": True,
    }


def test_an_operation_belongs_to_one_engine() -> None:
    command = GetOperation(tenant="", operation_id="op-1")
    assert merged(command, NOT_FOUND, success({"a": 1})).result == {"a": 1}


C, A, P, R = (
    EditStatus.COMPLETED,
    EditStatus.ACCEPTED,
    EditStatus.PARTIAL,
    EditStatus.REJECTED,
)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [((C, C), C), ((C, A), A), ((A, R), A), ((C, R), P), ((C, P), P), ((R, R), R)],
)
def test_edit_results_are_merged(
    statuses: tuple[EditStatus, ...], expected: EditStatus
) -> None:
    def reply(status: EditStatus) -> Reply:
        result = EditResult(
            type=EditType.OFFLOAD,
            status=status,
            operation_id="op" if status is A else None,
            blocks=BlockCounts(requested=3, done=2, already=1),
            num_bytes=10,
            reason="full" if status is R else None,
        )
        return success({"session_id": "s", "results": [result_to_wire(result)]})

    command = ApplyEdits(
        tenant="", session_id="s", edits=(Edit(type=EditType.OFFLOAD),)
    )
    result = merged(command, *map(reply, statuses)).result["results"][0]
    assert result == {
        "type": "offload",
        "status": expected.value,
        "operation_id": "op" if A in statuses else None,
        "blocks": {
            "requested": 6,
            "done": 4,
            "already": 2,
            "missing": 0,
            "reclaimed": 0,
        },
        "bytes": 20,
        "reason": "full" if R in statuses else None,
    }
