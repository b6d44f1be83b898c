from __future__ import annotations

import json
from typing import Any

import pytest

from sam_connector.cli.main import main
from tests.cli.conftest import ControlServer


def session(session_id: str, *, lease_s: float | None = None) -> dict[str, Any]:
    context = {
        "num_blocks": 4,
        "resident_blocks": 3,
        "num_tokens": 128,
        "lease_s": lease_s,
    }
    return {
        "session_id": session_id,
        "parent": None,
        "children": [],
        "contexts": [context, context],
        "blocks": {"gpu": 6, "host": 4, "store": 2},
        "lease_s": lease_s,
        "running_requests": 0,
        "operations": [],
    }


def edit_answer(status: str) -> dict[str, Any]:
    return {"session_id": "a", "results": [{"type": "evict", "status": status}]}


def test_sessions_is_a_table(
    control_server: ControlServer, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [session("worker-1", lease_s=12.4), session("worker-2")]
    control_server.will_answer({"sessions": known, "cursor": None})
    assert main(["sessions", "--url", control_server.url]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        *("SESSION", "CONTEXTS", "TOKENS", "GPU", "HOST", "STORE", "LEASE", "S")
    ]
    assert first.split() == ["worker-1", "2", "256", "6", "4", "2", "12"]
    assert second.split() == ["worker-2", "2", "256", "6", "4", "2", "-"]


def test_sessions_follows_the_cursor(
    control_server: ControlServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control_server.will_answer({"sessions": [session("a")], "cursor": "a"})
    control_server.will_answer({"sessions": [session("b")], "cursor": None})
    assert main(["sessions", "--json", "--url", control_server.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["session_id"] for line in lines] == ["a", "b"]
    assert control_server.asked[1].path.endswith("&cursor=a")


def test_show_prints_the_session(
    control_server: ControlServer, capsys: pytest.CaptureFixture[str]
) -> None:
    control_server.will_answer(session("a/b"))
    assert main(["show", "a/b", "--url", control_server.url]) == 0
    assert json.loads(capsys.readouterr().out) == session("a/b")
    assert control_server.asked[0].path == "/v1/agent/sessions/a%2Fb"


@pytest.mark.parametrize("verb", ["evict", "offload", "prefetch"])
@pytest.mark.usefixtures("capsys")
def test_edits(control_server: ControlServer, verb: str) -> None:
    control_server.will_answer(edit_answer("completed"))
    url = control_server.url
    assert main([verb, "a", "--wait", "2.5", "--url", url, "--api-key", "k"]) == 0
    (asked,) = control_server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/agent/sessions/a/edits")
    assert asked.body == {"edits": [{"type": verb}], "wait_s": 2.5}
    assert asked.authorization == "Bearer k"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("completed", 0),
        ("accepted", 0),
        ("partial", 1),
        ("unsupported", 1),
        ("not_found", 1),
        ("rejected", 1),
    ],
)
@pytest.mark.usefixtures("capsys")
def test_exit_status_tells_whether_the_edit_was_done(
    control_server: ControlServer, status: str, code: int
) -> None:
    control_server.will_answer(edit_answer(status))
    assert main(["evict", "a", "--url", control_server.url]) == code


@pytest.mark.usefixtures("capsys")
def test_reset(control_server: ControlServer) -> None:
    control_server.will_answer({"reset": True})
    assert main(["reset", "--url", control_server.url]) == 0
    assert control_server.asked[0].path == "/v1/agent/reset"


def test_server_and_key_may_come_from_the_environment(
    control_server: ControlServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SAM_URL", control_server.url)
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    control_server.will_answer({"sessions": [], "cursor": None})
    assert main(["sessions"]) == 0
    assert control_server.asked[0].authorization == "Bearer from-env"
    assert len(capsys.readouterr().out.splitlines()) == 1
