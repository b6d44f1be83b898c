"""The wire form: every bound, and messages that name the field and nothing of ours."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam_connector.core.types import Edit, EditType, SessionHint, SessionKey
from sam_connector.errors import HintError
from sam_connector.protocol.agent_hint import (
    AgentHintParams,
    encodable,
    lower,
    parse_agent_hint,
    parse_edits,
    parse_expected_resume,
    parse_session_id,
    parse_ttl,
)
from tests.protocol.invalid_hints import EVICT, INVALID_HINTS, edits, ttl


@pytest.mark.parametrize(("wire", "field"), INVALID_HINTS)
def test_an_invalid_hint_names_its_field(wire: object, field: str) -> None:
    with pytest.raises(HintError) as caught:
        lower(parse_agent_hint(wire), tenant="")
    assert caught.value.field == field
    assert "Params" not in str(caught.value)
    assert "Edit" not in str(caught.value)


@pytest.mark.parametrize("value", [0, 1e-9, 0.999, 1, 3599.999, 3600])
def test_n01_every_ttl_within_the_bounds_is_taken(value: float) -> None:
    params = parse_agent_hint(ttl(value))
    lowered = lower(params, tenant="")
    assert lowered is not None
    assert lowered.ttl_s == value


@pytest.mark.parametrize(
    "session_id",
    ["x", "x" * 256, "0123456789abcdef", "a b/c?d#%2F", "größe 会话 🙂"],
)
def test_p12_a_session_id_is_opaque(session_id: str) -> None:
    assert parse_agent_hint({"session_id": session_id}).session_id == session_id
    assert parse_session_id(session_id, field="session_id") == session_id


def test_the_whole_hint_is_lowered() -> None:
    params = parse_agent_hint(
        {
            "session_id": "child",
            "parent_session_id": "lead",
            "cache_control": {"type": "ephemeral", "ttl": 60, "block_offset": 4},
            "expected_resume_s": 12.5,
            "context_management": {
                "edits": [
                    {"type": "offload"},
                    {"type": "evict", "block_start": 2, "block_end": 5},
                ]
            },
        }
    )
    assert lower(params, tenant="t") == SessionHint(
        session=SessionKey("t", "child"),
        parent=SessionKey("t", "lead"),
        ttl_s=60,
        protect_blocks=4,
        edits=(
            Edit(type=EditType.OFFLOAD),
            Edit(type=EditType.EVICT, block_start=2, block_end=5),
        ),
        expected_resume_s=12.5,
    )


@pytest.mark.parametrize("value", [None, 0, 1e-9, 12, 3600])
def test_an_expected_resume_needs_no_lease(value: float | None) -> None:
    wire = {"session_id": "s", "expected_resume_s": value}
    assert lower(parse_agent_hint(wire), tenant="") == SessionHint(
        session=SessionKey("", "s"), expected_resume_s=value
    )
    assert parse_expected_resume(value) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "resume: must be at least 0"),
        (3601, "resume: must be at most 3600"),
        (math.nan, "resume: must be a finite number"),
        ("5", "resume: must be a number"),
    ],
)
def test_an_expected_resume_by_itself_is_bounded(value: object, message: str) -> None:
    with pytest.raises(HintError, match=message):
        parse_expected_resume(value, field="resume")


def test_defaults_are_those_of_the_specification() -> None:
    params = parse_agent_hint({"session_id": "s", "cache_control": {}})
    lowered = lower(params, tenant="")
    assert lowered is not None
    assert lowered.ttl_s == 300
    assert lowered.protect_blocks is None


def test_without_cache_control_no_retention_is_asked_for() -> None:
    assert lower(parse_agent_hint({"session_id": "s"}), tenant="") == SessionHint(
        session=SessionKey("", "s")
    )


def test_the_hint_s_own_session_id_wins() -> None:
    own = lower(parse_agent_hint({"session_id": "own"}), tenant="", session_id="other")
    other = lower(parse_agent_hint({}), tenant="", session_id="other")
    assert own is not None
    assert own.session.session_id == "own"
    assert other is not None
    assert other.session.session_id == "other"


def test_p15_an_empty_hint_names_no_session() -> None:
    assert lower(parse_agent_hint({}), tenant="t") is None


def test_names_reserved_for_extensions_are_ignored_everywhere() -> None:
    plain = edits(EVICT) | {"cache_control": {"ttl": 1}}
    extended = {
        "x_new": 1,
        "session_id": "s",
        "cache_control": {"ttl": 1, "x_new": {}},
        "context_management": {"edits": [EVICT | {"x_new": None}], "x_new": []},
    }
    assert parse_agent_hint(extended) == parse_agent_hint(plain)


def test_a_million_unknown_names_cost_one_error() -> None:
    wire = {f"name{i}": i for i in range(1_000_000)}
    with pytest.raises(HintError, match="name0: unknown field"):
        parse_agent_hint(wire)


@pytest.mark.parametrize("name", ["\ud800", "x" * 10_000])
def test_p07_an_unknown_name_can_be_repeated_in_a_reply(name: str) -> None:
    with pytest.raises(HintError) as caught:
        parse_agent_hint({name: 1})
    assert len(str(caught.value).encode()) < 500


def test_the_prefix_says_where_the_hint_stood() -> None:
    with pytest.raises(HintError) as caught:
        parse_agent_hint({"session_id": ""}, field_prefix="vllm_xargs.agent_hint")
    assert caught.value.field == "vllm_xargs.agent_hint.session_id"


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        ({}, "edits"),
        (None, "edits"),
        ([EVICT] * 17, "edits"),
        ([EVICT, {"type": "evict", "block_end": 1}], "edits.1.block_start"),
        (["evict"], "edits.0"),
    ],
)
def test_edits_alone_are_checked_alike(wire: object, field: str) -> None:
    with pytest.raises(HintError) as caught:
        parse_edits(wire)
    assert caught.value.field == field


def test_edits_alone_are_lowered() -> None:
    assert parse_edits([EVICT, {"type": "prefetch"}]) == (
        Edit(type=EditType.EVICT),
        Edit(type=EditType.PREFETCH),
    )


@pytest.mark.parametrize("value", [3601, -1, math.nan, "1", True, None, [], {}])
def test_n01_a_ttl_alone_is_checked_alike(value: object) -> None:
    with pytest.raises(HintError) as caught:
        parse_ttl(value)
    assert caught.value.field == "ttl"


@pytest.mark.parametrize("value", [None, 1, "", "\ud800", "\n", "x" * 257])
def test_a_session_id_alone_is_checked_alike(value: object) -> None:
    with pytest.raises(HintError, match="cursor: must"):
        parse_session_id(value, field="cursor")


def test_encodable_cuts_and_escapes() -> None:
    assert encodable("a\ud800") == "a\\ud800"
    assert encodable("x" * 100) == "x" * 64


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *AgentHintParams.model_fields,
                    *(
                        "ttl",
                        "type",
                        "edits",
                        "block_start",
                        "block_end",
                        "manage_request",
                    ),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_JSON)
def test_whatever_json_comes_the_outcome_is_a_hint_or_a_hint_error(
    wire: object,
) -> None:
    with suppress(HintError):
        lowered = lower(parse_agent_hint(wire), tenant="")
        assert lowered is None or 0 <= (lowered.ttl_s or 0) <= 3600
