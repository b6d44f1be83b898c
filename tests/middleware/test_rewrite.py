"""Where a hint goes, and what stays of the body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sam_connector.core.types import Edit, EditType, SessionHint, SessionKey
from sam_connector.errors import HintError
from sam_connector.middleware.endpoints import Dialect, Endpoint
from sam_connector.middleware.rewrite import ManagedRequest, Rewritten, rewrite
from sam_connector.protocol.lowering import hint_from_request
from tests.protocol.invalid_hints import INVALID_HINTS

CHAT = Endpoint(dialect=Dialect.CHAT, has_session_id=True)
MESSAGES = Endpoint(dialect=Dialect.MESSAGES, has_session_id=False)
CARRIER = Endpoint(dialect=Dialect.CARRIER, has_session_id=True)
ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, MESSAGES], ids=["chat", "msgs"])


def outcome(
    body: object,
    *,
    endpoint: Endpoint = CHAT,
    header: str | None = None,
    tenant: str = "",
) -> Rewritten | ManagedRequest | None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return rewrite(raw, endpoint=endpoint, session_header=header, tenant=tenant)


def rewritten(body: object, **options: Any) -> Any:
    result = outcome(body, **options)
    assert isinstance(result, Rewritten)
    return json.loads(result.body)


def engine_hint(body: Any, header: str | None = None) -> SessionHint | None:
    """What the engine understands, given how vLLM hands the body's fields on."""
    xargs = body.get("vllm_xargs") or {}
    return hint_from_request(
        kv_transfer_params=body.get("kv_transfer_params"),
        session_id=body.get("session_id") or header or xargs.get("session_id"),
        extra_args=xargs,
    )


HINT = {"session_id": "s", "cache_control": {"ttl": 60}}
LOWERED = {"session_id": "s", "cache_control": {"type": "ephemeral", "ttl": 60}}


@ENDPOINTS
def test_the_hint_moves_to_kv_transfer_params(endpoint: Endpoint) -> None:
    body = rewritten({"model": "m", "agent_hint": HINT}, endpoint=endpoint)
    assert "agent_hint" not in body
    assert body["kv_transfer_params"] == {"agent_hint": LOWERED}
    assert engine_hint(body) == SessionHint(session=SessionKey("", "s"), ttl_s=60)


def test_vllm_s_own_session_id_is_filled_where_the_endpoint_has_it() -> None:
    body = {"agent_hint": HINT, "session_id": "other", "vllm_xargs": {"k": 1}}
    assert rewritten(body)["session_id"] == "s"
    assert rewritten(body)["vllm_xargs"] == {"k": 1}
    for_messages = rewritten(body, endpoint=MESSAGES)
    assert for_messages["vllm_xargs"] == {"k": 1, "session_id": "s"}


def test_other_fields_stay_as_they_are() -> None:
    others = {
        "model": "m",
        "messages": [{"role": "user", "content": "größe 🙂 </s> \u0000"}],
        "temperature": 0.1,
        "seed": 2**63 - 1,
        "stop": None,
        "metadata": {"agent_hint": "mine"},
        "logit_bias": {"1": 1e-7},
    }
    kv_params = {"do_remote_decode": True, "remote": [1, {"a": None}]}
    body = rewritten(others | {"kv_transfer_params": kv_params, "agent_hint": HINT})
    assert body == others | {
        "kv_transfer_params": kv_params | {"agent_hint": LOWERED},
        "session_id": "s",
    }


@ENDPOINTS
@pytest.mark.parametrize("key", ["kv_transfer_params", "vllm_xargs"])
def test_a_hint_given_further_down_is_lowered_alike(
    key: str, endpoint: Endpoint
) -> None:
    wire = HINT if key == "kv_transfer_params" else json.dumps(HINT)
    body = rewritten({key: {"agent_hint": wire}}, endpoint=endpoint)
    assert body["kv_transfer_params"] == {"agent_hint": LOWERED}
    assert "agent_hint" not in body.get("vllm_xargs", {})


def test_of_several_hints_the_first_counts_and_none_stays() -> None:
    body = rewritten(
        {
            "agent_hint": {"session_id": "1"},
            "kv_transfer_params": {"agent_hint": {"session_id": "2"}},
            "vllm_xargs": {"agent_hint": '{"session_id": "3"}'},
        }
    )
    assert body == {
        "kv_transfer_params": {"agent_hint": {"session_id": "1"}},
        "vllm_xargs": {},
        "session_id": "1",
    }


@pytest.mark.parametrize("wire", [None, {}])
def test_an_empty_hint_is_taken_out(wire: object) -> None:
    assert rewritten({"model": "m", "agent_hint": wire}) == {"model": "m"}


def test_p15_precedence_of_session_ids() -> None:
    body = {"session_id": "field", "vllm_xargs": {"session_id": "xargs"}}
    wire = {"cache_control": {}}

    def chosen(given: dict[str, object], header: str | None) -> str:
        given = given | {"agent_hint": wire}
        lowered = rewritten(given, header=header)["kv_transfer_params"]["agent_hint"]
        return str(lowered["session_id"])

    assert chosen(body, "header") == "field"
    del body["session_id"]
    assert chosen(body, "header") == "header"
    assert chosen(body, None) == "xargs"
    assert chosen(body | {"session_id": ""}, "") == "xargs"


def test_p15_messages_have_no_session_id_field() -> None:
    body = {"session_id": "ignored", "agent_hint": {"cache_control": {}}}
    lowered = rewritten(body, endpoint=MESSAGES, header="header")
    assert lowered["kv_transfer_params"]["agent_hint"]["session_id"] == "header"


@pytest.mark.parametrize(
    ("body", "header", "field"),
    [
        ({"session_id": "\n"}, None, "session_id"),
        ({}, "x" * 257, "X-Session-ID"),
        ({"vllm_xargs": {"session_id": "\ud800"}}, None, "vllm_xargs.session_id"),
    ],
)
def test_a_bad_session_id_elsewhere_is_named_where_it_stood(
    body: dict[str, object], header: str | None, field: str
) -> None:
    with pytest.raises(HintError) as caught:
        outcome(body | {"agent_hint": {"cache_control": {}}}, header=header)
    assert caught.value.field == field


@pytest.mark.parametrize(("wire", "field"), INVALID_HINTS)
@pytest.mark.parametrize("key", [None, "kv_transfer_params", "vllm_xargs"])
def test_an_invalid_hint_names_its_field(
    wire: object, field: str, key: str | None
) -> None:
    body = {"agent_hint": wire} if key is None else {key: {"agent_hint": wire}}
    if key == "vllm_xargs":
        body = {key: {"agent_hint": json.dumps(wire)}}
    with pytest.raises(HintError) as caught:
        outcome(body)
    assert caught.value.field == (field if key is None else f"{key}.{field}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"content": "\ud800"}]}, "messages.0.content"),
        ({"model": "\udfff"}, "model"),
        ({"metadata": {"k\ud800": 1}}, "metadata.k\\ud800"),
        ({"prompt": ["fine", ["a", "\ud83d"]]}, "prompt.1.1"),
    ],
)
@pytest.mark.parametrize("manage", [False, True])
def test_p07_a_lone_surrogate_is_named(
    body: dict[str, object], field: str, manage: bool
) -> None:
    hint = {"session_id": "s", "context_management": {"manage_request": manage}}
    with pytest.raises(HintError, match="surrogates") as caught:
        outcome(body | {"agent_hint": hint})
    assert caught.value.field == field


def test_p07_a_surrogate_written_as_raw_bytes_is_named_too() -> None:
    raw = b'{"agent_hint": {"session_id": "s"}, "prompt": "\xed\xa0\x80"}'
    with pytest.raises(HintError) as caught:
        outcome(raw)
    assert caught.value.field == "prompt"


def test_a_surrogate_pair_is_a_character() -> None:
    raw = rb'{"agent_hint": {"session_id": "s"}, "prompt": "\ud83d\ude42"}'
    assert rewritten(raw)["prompt"] == "🙂"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"agent_hint",
        b'{"agent_hint": ',
        b"\xff\xfe\x00agent_hint",
        b"\x1f\x8b\x08\x00",
        b'["agent_hint"]',
        b'"agent_hint"',
        b"null",
        b'{"agent_hint": {}, "seed": ' + b"1" * 5000 + b"}",
        {"messages": ["agent_hint"]},
        {"agent_hint": HINT, "kv_transfer_params": "text"},
        {"agent_hint": HINT, "vllm_xargs": [1]},
    ],
)
def test_what_is_no_hint_or_no_valid_body_is_left_to_vllm(body: object) -> None:
    assert outcome(body) is None


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_bottomless_nesting_is_refused_here(opening: bytes) -> None:
    with pytest.raises(HintError, match="nested too deeply"):
        outcome(b'{"agent_hint": ' + opening * 100_000)


def test_a_long_path_to_a_surrogate_is_cut() -> None:
    value: object = "\ud800"
    for _ in range(200):
        value = {"k": value}
    with pytest.raises(HintError) as caught:
        outcome({"agent_hint": {"session_id": "s"}, "deep": value})
    assert len(caught.value.field) < 100


EVICT = {"context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}


@ENDPOINTS
def test_a_management_request_is_recognised(endpoint: Endpoint) -> None:
    body = {"model": "m", "stream": True, "agent_hint": {"session_id": "s", **EVICT}}
    assert outcome(body, endpoint=endpoint, tenant="t") == ManagedRequest(
        hint=SessionHint(
            session=SessionKey("t", "s"), edits=(Edit(type=EditType.EVICT),)
        ),
        model="m",
        stream=True,
    )


def test_a_management_request_needs_neither_model_nor_prompt() -> None:
    result = outcome({"agent_hint": EVICT, "model": None}, header="s")
    assert isinstance(result, ManagedRequest)
    assert result.model is None
    assert not result.stream


def test_edits_without_manage_request_travel_with_the_request() -> None:
    management = {"edits": [{"type": "offload", "block_start": 1, "block_end": 3}]}
    body = rewritten(
        {"agent_hint": {"session_id": "s", "context_management": management}}
    )
    hint = engine_hint(body)
    assert hint is not None
    assert hint.edits == (Edit(type=EditType.OFFLOAD, block_start=1, block_end=3),)


# --- tenants ------------------------------------------------------------------------

SPOOFED = {"session_id": "s", "tenant": "victim"}


@ENDPOINTS
@pytest.mark.parametrize("tenant", ["", "t"])
@pytest.mark.parametrize(
    "place",
    [
        lambda wire: {"agent_hint": wire},
        lambda wire: {"kv_transfer_params": {"agent_hint": wire}},
        lambda wire: {"vllm_xargs": {"agent_hint": json.dumps(wire)}},
        lambda wire: {
            "agent_hint": {"session_id": "s"},
            "kv_transfer_params": {"agent_hint": wire},
        },
        lambda wire: {
            "agent_hint": None,
            "kv_transfer_params": {"agent_hint": wire, "tenant": "victim"},
            "tenant": "victim",
        },
    ],
)
def test_a_client_cannot_name_a_tenant(
    place: Any, tenant: str, endpoint: Endpoint
) -> None:
    body = rewritten(place(SPOOFED), tenant=tenant, endpoint=endpoint)
    hint = engine_hint(body)
    assert hint is not None
    assert hint.session == SessionKey(tenant, "s")


@ENDPOINTS
@pytest.mark.parametrize(
    ("body", "header"),
    [({}, "s"), ({"vllm_xargs": {"session_id": "s"}}, None)],
    ids=["header", "xargs"],
)
def test_a_session_named_without_hint_gets_its_tenant(
    body: dict[str, object], header: str | None, endpoint: Endpoint
) -> None:
    changed = rewritten(body, header=header, tenant="t", endpoint=endpoint)
    assert changed == body | {"kv_transfer_params": {"agent_hint": {"tenant": "t"}}}
    hint = engine_hint(changed, header)
    assert hint == SessionHint(session=SessionKey("t", "s"))


def test_the_session_id_field_gets_its_tenant_and_nothing_is_validated() -> None:
    body = {"session_id": "\n", "prompt": "\ud800", "agent_hint": None}
    assert rewritten(body, tenant="t") == {
        "session_id": "\n",
        "prompt": "\ud800",
        "kv_transfer_params": {"agent_hint": {"tenant": "t"}},
    }


def test_without_session_and_hint_a_tenant_changes_nothing() -> None:
    assert outcome({"messages": ["session_id"]}, tenant="t") is None


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": {"agent_hint": SPOOFED}},
        {
            "sampling_params": {
                "extra_args": {"kv_transfer_params": {"agent_hint": SPOOFED}}
            }
        },
        {
            "kv_transfer_params": {"agent_hint": SPOOFED},
            "sampling_params": {
                "extra_args": {"kv_transfer_params": {"agent_hint": SPOOFED}}
            },
        },
    ],
)
def test_on_a_carrier_every_tenant_is_the_client_s_own(body: Any) -> None:
    changed = rewritten(body, endpoint=CARRIER, tenant="t")
    extra = (changed.get("sampling_params") or {}).get("extra_args") or {}
    for kv_params in (
        changed["kv_transfer_params"],
        extra.get("kv_transfer_params") or changed["kv_transfer_params"],
    ):
        assert kv_params["agent_hint"]["tenant"] == "t"


def test_on_a_carrier_a_field_of_another_route_is_no_way_around() -> None:
    body = {"vllm_xargs": 1, "kv_transfer_params": {"agent_hint": SPOOFED}}
    changed = rewritten(body, endpoint=CARRIER, tenant="t")
    assert changed["kv_transfer_params"]["agent_hint"]["tenant"] == "t"


def test_on_a_carrier_what_vllm_will_refuse_is_left_as_it_is() -> None:
    body = {"sampling_params": {"extra_args": {"kv_transfer_params": "text"}}}
    changed = rewritten(body, endpoint=CARRIER, tenant="t")
    assert changed["sampling_params"] == body["sampling_params"]


def test_on_a_carrier_a_hint_as_text_claims_no_tenant() -> None:
    body = {"kv_transfer_params": {"agent_hint": json.dumps(SPOOFED)}}
    changed = rewritten(body, endpoint=CARRIER, tenant="t")
    hint = engine_hint(changed)
    assert hint is not None
    assert hint.session.tenant == ""
