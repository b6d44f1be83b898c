"""The contract without the middleware: where a hint may stand, and what wins."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sam_connector.core.types import SessionHint, SessionKey
from sam_connector.errors import HintError
from sam_connector.protocol.lowering import hint_from_request


def lowered(**given: Any) -> SessionHint | None:
    return hint_from_request(
        **({"kv_transfer_params": None, "session_id": None, "extra_args": None} | given)
    )


def kv(**hint: object) -> dict[str, object]:
    return {"agent_hint": hint}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"session_id": ""},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": {"agent_hint": None}},
        {"kv_transfer_params": {"agent_hint": {}}},
        {"kv_transfer_params": {"agent_hint": {"tenant": "t"}}},
        {"kv_transfer_params": "agent_hint"},
        {"extra_args": {"other": 1, "session_id": 7}},
        {"extra_args": {"kv_transfer_params": {"agent_hint": {"session_id": "s"}}}},
    ],
)
def test_p15_a_request_that_names_no_session_has_no_hint(given: Any) -> None:
    assert lowered(**given) is None


def test_a_session_id_of_vllm_s_own_is_recorded_without_retention() -> None:
    assert lowered(session_id="s") == SessionHint(session=SessionKey("", "s"))


def test_a_hint_in_kv_transfer_params() -> None:
    hint = lowered(kv_transfer_params=kv(session_id="s", cache_control={"ttl": 5}))
    assert hint == SessionHint(session=SessionKey("", "s"), ttl_s=5)


@pytest.mark.parametrize("encode", [dict, json.dumps])
def test_a_hint_in_extra_args_as_object_or_text(encode: Any) -> None:
    wire = encode({"session_id": "s", "cache_control": {"ttl": 5}})
    hint = lowered(extra_args={"agent_hint": wire})
    assert hint == SessionHint(session=SessionKey("", "s"), ttl_s=5)


@pytest.mark.parametrize(
    "given",
    [
        {"kv_transfer_params": kv(session_id="s", expected_resume_s=5)},
        {"kv_transfer_params": kv(expected_resume_s=5), "session_id": "s"},
        {
            "kv_transfer_params": {
                "agent_hint": '{"session_id": "s", "expected_resume_s": 5}'
            }
        },
        {"extra_args": {"agent_hint": {"session_id": "s", "expected_resume_s": 5}}},
        {"extra_args": {"agent_hint": '{"session_id": "s", "expected_resume_s": 5}'}},
        {"extra_args": {"agent_hint": {"expected_resume_s": 5}, "session_id": "s"}},
        {
            "kv_hints": SimpleNamespace(
                actions=[
                    SimpleNamespace(
                        action_type="agent_hint",
                        action_version="1",
                        payload={"session_id": "s", "expected_resume_s": 5},
                    )
                ]
            )
        },
    ],
)
def test_an_expected_resume_comes_through_wherever_a_hint_may_stand(given: Any) -> None:
    assert lowered(**given) == SessionHint(
        session=SessionKey("", "s"), expected_resume_s=5
    )


def test_p15_precedence_of_session_ids() -> None:
    places: list[tuple[str, Any]] = [
        ("kv_transfer_params", kv(session_id="1", cache_control={})),
        ("extra_args", {"agent_hint": {"session_id": "2"}, "session_id": "4"}),
        ("session_id", "3"),
    ]
    for first in range(3):
        hint = lowered(**dict(places[first:]))
        assert hint is not None
        assert hint.session.session_id == str(first + 1)
    hint = lowered(extra_args={"session_id": "4"})
    assert hint is not None
    assert hint.session.session_id == "4"


def test_a_hint_without_id_speaks_of_the_request_s_session() -> None:
    hint = lowered(kv_transfer_params=kv(cache_control={"ttl": 9}), session_id="s")
    assert hint == SessionHint(session=SessionKey("", "s"), ttl_s=9)


def test_the_tenant_travels_beside_the_hint() -> None:
    hint = lowered(
        kv_transfer_params=kv(tenant="t", session_id="s", parent_session_id="p")
    )
    assert hint == SessionHint(
        session=SessionKey("t", "s"), parent=SessionKey("t", "p")
    )


def test_the_tenant_alone_applies_to_hints_from_elsewhere() -> None:
    by_request = lowered(kv_transfer_params=kv(tenant="t"), session_id="s")
    by_xargs = lowered(
        kv_transfer_params=kv(tenant="t"),
        extra_args={"agent_hint": {"session_id": "s"}},
    )
    assert by_request is not None
    assert by_xargs is not None
    assert by_request.session == by_xargs.session == SessionKey("t", "s")


@pytest.mark.parametrize("encode", [dict, json.dumps])
def test_a_tenant_anywhere_else_is_no_tenant(encode: Any) -> None:
    wire = encode({"session_id": "s", "tenant": "spoofed"})
    assert lowered(extra_args={"agent_hint": wire}) == SessionHint(
        session=SessionKey("", "s")
    )
    text = json.dumps({"session_id": "s", "tenant": "spoofed"})
    assert lowered(kv_transfer_params={"agent_hint": text}) == SessionHint(
        session=SessionKey("", "s")
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"session_id": "\ud800"}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        (
            {"kv_transfer_params": kv(session_id=1)},
            "kv_transfer_params.agent_hint.session_id",
        ),
        ({"kv_transfer_params": {"agent_hint": [1]}}, "kv_transfer_params.agent_hint"),
        ({"kv_transfer_params": kv(tenant=1)}, "kv_transfer_params.agent_hint.tenant"),
        (
            {"kv_transfer_params": kv(tenant="x" * 65)},
            "kv_transfer_params.agent_hint.tenant",
        ),
        (
            {"kv_transfer_params": kv(cache_control={}), "session_id": "\n"},
            "session_id",
        ),
        (
            {"kv_transfer_params": kv(cache_control={})},
            "kv_transfer_params.agent_hint.session_id",
        ),
        ({"extra_args": {"agent_hint": "{"}}, "vllm_xargs.agent_hint"),
        ({"extra_args": {"agent_hint": "[" * 10_000}}, "vllm_xargs.agent_hint"),
        ({"extra_args": {"agent_hint": " " * 20_000}}, "vllm_xargs.agent_hint"),
        ({"extra_args": {"agent_hint": 7}}, "vllm_xargs.agent_hint"),
    ],
)
def test_what_is_invalid_is_a_hint_error(given: Any, field: str) -> None:
    with pytest.raises(HintError) as caught:
        lowered(**given)
    assert caught.value.field == field


def envelope(action_type: str, version: str = "1") -> SimpleNamespace:
    action = SimpleNamespace(
        action_id="a",
        action_type=action_type,
        action_version=version,
        payload={"session_id": "s", "cache_control": {"ttl": 5}},
    )
    return SimpleNamespace(protocol_version="1", message_id="m", actions=[action])


def test_an_action_of_vllm_s_hint_envelope_may_carry_a_hint() -> None:
    expected = SessionHint(session=SessionKey("", "s"), ttl_s=5)
    assert lowered(kv_hints=envelope("agent_hint")) == expected


def test_actions_for_others_are_left_to_them() -> None:
    assert lowered(kv_hints=envelope("prefetch")) is None
    assert lowered(kv_hints=envelope("agent_hint", version="2")) is None


def test_a_request_without_a_hint_is_not_validated_or_copied() -> None:
    """Only three look-ups: anything else would raise on this mapping."""

    class Guarded(dict[str, Any]):
        asked: list[str]

        def get(self, key: str, default: Any = None) -> Any:
            self.asked.append(key)
            return None

        def __iter__(self) -> Any:
            raise AssertionError("iterated")

    params, args = Guarded(do_remote_decode=True), Guarded(top_k=1)
    params.asked, args.asked = [], []
    assert lowered(kv_transfer_params=params, extra_args=args) is None
    assert params.asked == ["agent_hint"]
    assert args.asked == ["agent_hint", "session_id"]
