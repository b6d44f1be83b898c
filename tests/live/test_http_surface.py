"""Hints, management requests and control routes of a real server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.live.endpoints import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PATHS,
    RESPONSES,
    TEXT,
    body_of,
    error_of,
    events_of,
    managing,
    session_of,
    session_path,
)
from tests.live.server import MODEL_NAME, LiveServer, cached_tokens

EVICT = {"type": "evict"}
LEASE = {"cache_control": {"type": "ephemeral", "ttl": 600}}
PROMPT = list(range(100, 400))

each_path = pytest.mark.parametrize("path", PATHS)


# --- hints ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@each_path
def test_hint_registers_the_session(
    live_server: LiveServer, path: str, stream: bool
) -> None:
    hint = {"session_id": "worker/7", "parent_session_id": "lead", **LEASE}
    answer = live_server.post(
        path, body_of(path) | {"stream": stream, "agent_hint": hint}
    )
    assert answer.status_code == 200, answer.text
    if stream:
        assert len(events_of(answer)) > 2
    session = session_of(live_server, "worker/7")
    assert session is not None
    assert session["parent"] == "lead"
    assert 0 < session["lease_s"] <= 600
    (context,) = session["contexts"]
    assert context["resident_blocks"] == context["num_blocks"] > 1
    assert session["running_requests"] == 0


@each_path
def test_results_of_edits_come_back_with_the_answer(
    live_server: LiveServer, path: str
) -> None:
    hint = {"session_id": "done", "context_management": {"edits": [EVICT]}}
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    (result,) = answer.json()["kv_transfer_params"]["agent_hint"]["results"]
    assert result["type"] == "evict"
    assert result["status"] == "completed"
    assert result["blocks"]["done"] == result["blocks"]["requested"] > 1
    assert session_of(live_server, "done") is None


@each_path
def test_offload_and_prefetch_are_unsupported_and_harmless(
    live_server: LiveServer, path: str
) -> None:
    edits = [{"type": "offload"}, {"type": "prefetch"}]
    hint = {"session_id": "s", "context_management": {"edits": edits}}
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200
    results = answer.json()["kv_transfer_params"]["agent_hint"]["results"]
    assert [result["status"] for result in results] == ["unsupported"] * 2
    assert session_of(live_server, "s") is not None


def test_evicted_context_still_hits_until_it_is_reused(live_server: LiveServer) -> None:
    live_server.reset_prefix_cache()
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    answer = live_server.post(f"{session_path('s')}/edits", {"edits": [EVICT]})
    assert answer.json()["results"][0]["status"] == "completed"
    assert cached_tokens(live_server.complete(PROMPT)) == 288


# --- the other spellings --------------------------------------------------------------


@each_path
def test_p15_session_header_registers_the_session(
    live_server: LiveServer, path: str
) -> None:
    answer = live_server.client.post(
        path, json=body_of(path), headers={"X-Session-ID": "header"}
    )
    assert answer.status_code == 200, answer.text
    session = session_of(live_server, "header")
    assert session is not None
    assert session["lease_s"] is None


@pytest.mark.parametrize(
    ("fields", "has_lease"),
    [
        ({"vllm_xargs": {"session_id": "s"}}, False),
        (
            {"vllm_xargs": {"agent_hint": json.dumps({"session_id": "s", **LEASE})}},
            True,
        ),
        ({"kv_transfer_params": {"agent_hint": {"session_id": "s", **LEASE}}}, True),
    ],
    ids=["xargs_session_id", "xargs_hint", "kv_transfer_params"],
)
@each_path
def test_p15_fields_of_vllm_register_the_session(
    live_server: LiveServer, path: str, fields: Mapping[str, Any], has_lease: bool
) -> None:
    answer = live_server.post(path, body_of(path) | fields)
    assert answer.status_code == 200, answer.text
    session = session_of(live_server, "s")
    assert session is not None
    assert (session["lease_s"] is not None) == has_lease


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_p15_session_id_of_the_body_registers_the_session(
    live_server: LiveServer, path: str
) -> None:
    answer = live_server.post(path, body_of(path) | {"session_id": "body"})
    assert answer.status_code == 200, answer.text
    assert session_of(live_server, "body") is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"agent_hint": {"session_id": "s", **LEASE}}},
        {"vllm_xargs": {"agent_hint": json.dumps({"session_id": "s", **LEASE})}},
    ],
    ids=["kv_transfer_params", "xargs"],
)
def test_engine_reads_hints_that_no_middleware_has_seen(
    live_server: LiveServer, fields: Mapping[str, Any]
) -> None:
    """Without API keys the middleware leaves this route alone."""
    answer = live_server.post("/invocations", body_of(COMPLETIONS) | fields)
    assert answer.status_code == 200, answer.text
    session = session_of(live_server, "s")
    assert session is not None
    assert session["lease_s"] is not None


def test_invalid_hint_that_reaches_the_engine_is_counted(
    live_server: LiveServer,
) -> None:
    before = live_server.stats()["invalid_hints"]
    hint = {"session_id": "s", "cache_control": {"ttl": -1}}
    fields = {"kv_transfer_params": {"agent_hint": hint}}
    answer = live_server.post("/invocations", body_of(COMPLETIONS) | fields)
    assert answer.status_code == 200, answer.text
    assert session_of(live_server, "s") is None
    assert live_server.stats()["invalid_hints"] == before + 1


def test_p15_first_of_several_session_ids_counts(live_server: LiveServer) -> None:
    ranked = ["hint", "kv_params", "xargs_hint", "body", "header", "xargs"]
    for first, expected in enumerate(ranked):
        given = set(ranked[first:])
        body = body_of(COMPLETIONS, f"{expected} {TEXT}")
        xargs: dict[str, str] = {"session_id": "xargs"}
        if "xargs_hint" in given:
            xargs["agent_hint"] = json.dumps({"session_id": "xargs_hint"})
        body["vllm_xargs"] = xargs
        if "hint" in given:
            body["agent_hint"] = {"session_id": "hint"}
        if "kv_params" in given:
            body["kv_transfer_params"] = {"agent_hint": {"session_id": "kv_params"}}
        if "body" in given:
            body["session_id"] = "body"
        headers = {"X-Session-ID": "header"} if "header" in given else {}
        answer = live_server.client.post(COMPLETIONS, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        sessions = live_server.get("/v1/agent/sessions").json()["sessions"]
        assert [session["session_id"] for session in sessions] == [expected]
        live_server.delete(session_path(expected))


@each_path
def test_p15_requests_that_name_no_session_make_none(
    live_server: LiveServer, path: str
) -> None:
    for extra in ({}, {"agent_hint": {}}, {"agent_hint": None}):
        assert live_server.post(path, body_of(path) | extra).status_code == 200
    assert live_server.stats()["sessions"] == 0


# --- invalid hints and unknown fields -------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"session_id": ""}, "agent_hint.session_id"),
        ({**LEASE}, "agent_hint.session_id"),
        (
            {"session_id": "s", "cache_control": {"ttl": 3601}},
            "agent_hint.cache_control.ttl",
        ),
        (
            {"session_id": "s", "cache_control": {"ttl_s": 5}},
            "agent_hint.cache_control.ttl_s",
        ),
        (
            {"session_id": "s", "context_management": {"edits": [{"type": "drop"}]}},
            "agent_hint.context_management.edits.0.type",
        ),
        ("text", "agent_hint"),
    ],
    ids=["empty_id", "no_id", "long_ttl", "unknown_field", "unknown_edit", "text"],
)
@each_path
def test_invalid_hint_is_a_400_that_names_the_field(
    live_server: LiveServer, path: str, hint: object, field: str
) -> None:
    before = live_server.metrics()["vllm:prompt_tokens_total"]
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 400
    assert field in error_of(answer)
    if path == MESSAGES:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    else:
        assert answer.json()["error"]["param"] == field
    assert live_server.metrics()["vllm:prompt_tokens_total"] == before


@each_path
def test_p06_extension_fields_are_ignored(live_server: LiveServer, path: str) -> None:
    hint = {
        "session_id": "s",
        "x_later": {"a": [1]},
        "cache_control": {"ttl": 60, "x_pin": True},
    }
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200, answer.text
    assert session_of(live_server, "s") is not None


@each_path
def test_p06_hint_leaves_no_warning_in_the_log(
    live_server: LiveServer, path: str
) -> None:
    before = len(live_server.log_text())
    hint = {"session_id": "quiet", **LEASE}
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200, answer.text
    written = live_server.log_text()[before:]
    assert "agent_hint" not in written
    assert "quiet" not in written
    assert "WARNING" not in written


@each_path
def test_p06_stock_server_ignores_a_hint(stock_server: LiveServer, path: str) -> None:
    hint = {"session_id": "s", "cache_control": {"ttl": -1}}
    answer = stock_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200, answer.text


@each_path
def test_errors_of_vllm_itself_are_its_own(
    live_server: LiveServer, stock_server: LiveServer, path: str
) -> None:
    wrong = body_of(path) | {"max_tokens": "x", "max_output_tokens": "x"}
    hinted = wrong | {"agent_hint": {"session_id": "s", **LEASE}}
    ours, stock = live_server.post(path, hinted), stock_server.post(path, wrong)
    assert ours.status_code == stock.status_code == 400
    assert error_of(ours) == error_of(stock)
    assert session_of(live_server, "s") is None


# --- management requests --------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@each_path
def test_management_request_runs_no_model(
    live_server: LiveServer, path: str, stream: bool
) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    before = live_server.metrics()
    hint = managing("s", "offload", "evict")
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200, answer.text
    told = answer.json()["kv_transfer_params"]["agent_hint"]
    assert told["session_id"] == "s"
    statuses = [result["status"] for result in told["results"]]
    assert statuses == ["unsupported", "completed"]
    assert session_of(live_server, "s") is None
    after = live_server.metrics()
    for name in ("vllm:prompt_tokens_total", "vllm:request_success_total"):
        assert after[name] == before[name]


@each_path
def test_management_request_needs_no_prompt_and_may_stream(
    live_server: LiveServer, path: str
) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s"})
    answer = live_server.post(
        path, {"stream": True, "agent_hint": managing("s", "evict")}
    )
    assert answer.status_code == 200, answer.text
    assert '"status": "completed"' in answer.text
    assert MODEL_NAME in answer.text
    assert events_of(answer)


@each_path
def test_management_of_an_unknown_session_is_not_found(
    live_server: LiveServer, path: str
) -> None:
    hint = managing("nobody", "evict")
    answer = live_server.post(path, body_of(path) | {"agent_hint": hint})
    assert answer.status_code == 200, answer.text
    (result,) = answer.json()["kv_transfer_params"]["agent_hint"]["results"]
    assert result["status"] == "not_found"
    assert session_of(live_server, "nobody") is None


# --- control routes -------------------------------------------------------------------


def test_unknown_session_is_not_found(live_server: LiveServer) -> None:
    path = session_path("nobody")
    assert live_server.get(path).status_code == 404
    assert live_server.delete(path).status_code == 404
    assert live_server.put(f"{path}/lease", {"ttl": 5}).status_code == 404
    answer = live_server.post(f"{path}/edits", {"edits": [EVICT]})
    assert answer.status_code == 200
    assert answer.json()["results"][0]["status"] == "not_found"
    assert live_server.get("/v1/agent/operations/op-1").status_code == 404


def test_lease_is_given_and_ended_without_a_request(live_server: LiveServer) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s"})
    lease = f"{session_path('s')}/lease"
    answer = live_server.put(lease, {"ttl": 900})
    assert answer.json() == {"session_id": "s", "ttl": 900, "status": "completed"}
    session = session_of(live_server, "s")
    assert session is not None
    assert 800 < session["lease_s"] <= 900
    assert live_server.stats()["protected_blocks"] >= 9
    assert live_server.put(lease, {"ttl": 0}).json()["status"] == "completed"
    session = session_of(live_server, "s")
    assert session is not None
    assert session["lease_s"] is None
    assert live_server.stats()["protected_blocks"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("PUT", "/lease", {"ttl": "5"}, "ttl"),
        ("PUT", "/lease", {}, "ttl"),
        ("POST", "/edits", {"edits": [EVICT] * 17}, "edits"),
        ("POST", "/edits", {"edits": [EVICT], "now": True}, "now"),
        ("POST", "/edits", {"edits": [{"type": "evict", "block_end": 3}]}, "edits.0"),
        ("DELETE", "?tree=perhaps", None, "tree"),
    ],
)
def test_invalid_control_call_is_a_400_that_names_the_field(
    live_server: LiveServer, method: str, path: str, body: object, field: str
) -> None:
    answer = live_server.client.request(method, session_path("s") + path, json=body)
    assert answer.status_code == 400
    assert field in error_of(answer)


def test_tree_is_forgotten_with_its_root(live_server: LiveServer) -> None:
    for name, parent in [("lead", None), ("child", "lead"), ("leaf", "child")]:
        hint = {"session_id": name, **LEASE}
        if parent is not None:
            hint["parent_session_id"] = parent
        live_server.complete(PROMPT, hint=hint)
    lead = session_of(live_server, "lead")
    assert lead is not None
    assert lead["children"] == ["child"]
    assert live_server.delete(session_path("leaf")).json() == {"freed": 1}
    answer = live_server.delete(f"{session_path('lead')}?tree=true")
    assert answer.json() == {"freed": 2}
    assert live_server.stats()["sessions"] == 0
    assert live_server.stats()["claimed_blocks"] == 0


def test_list_of_sessions_comes_in_pages(live_server: LiveServer) -> None:
    names = [f"s-{number}" for number in range(5)]
    for name in names:
        live_server.complete(PROMPT, hint={"session_id": name})
    seen, cursor = [], ""
    while True:
        page = live_server.get(f"/v1/agent/sessions?limit=2{cursor}").json()
        seen += [session["session_id"] for session in page["sessions"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == names


def test_operator_reset_forgets_all_sessions(live_server: LiveServer) -> None:
    live_server.complete(PROMPT, hint={"session_id": "s", **LEASE})
    assert live_server.post("/v1/agent/reset").json() == {"reset": True}
    assert session_of(live_server, "s") is None
    assert live_server.stats()["protected_blocks"] == 0
