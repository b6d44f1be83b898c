"""The control routes: what they ask the engine, and what clients see."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from sam_connector.core.types import Edit, EditType
from sam_connector.protocol.control import (
    ApplyEdits,
    Command,
    FreeSession,
    GetOperation,
    GetSession,
    GetStats,
    ListSessions,
    Reset,
    SetLease,
    failure,
    success,
)
from tests.middleware.driver import Response, Server, call, make_server

SESSIONS = "/v1/agent/sessions"
IDS = [
    "s",
    "0123456789abcdef",
    "a/b",
    "/a/",
    "a/edits",
    "a/lease",
    "edits",
    "größe 会话 🙂",
    "50%",
    "a b?c#d&e=f",
    "..",
    "%2F",
    "x" * 256,
]


@pytest.fixture
def server() -> Server:
    return make_server()


def ask(server: Server, method: str, path: str, body: object = None) -> Response:
    return call(server.app, method, path, b"" if body is None else body)


def command_of(server: Server) -> Command:
    (command,) = server.engine.commands
    return command


@pytest.mark.parametrize("session_id", IDS)
def test_p12_every_id_works_on_every_route(server: Server, session_id: str) -> None:
    base = f"{SESSIONS}/{quote(session_id, safe='')}"
    assert ask(server, "GET", base).status == 200
    assert ask(server, "DELETE", base).status == 200
    assert ask(server, "PUT", f"{base}/lease", {"ttl": 1}).status == 200
    edits = [{"type": "evict"}]
    assert ask(server, "POST", f"{base}/edits", {"edits": edits}).status == 200
    ids = [command.session_id for command in server.engine.commands]  # type: ignore[union-attr]
    assert ids == [session_id] * 4
    kinds = [type(command) for command in server.engine.commands]
    assert kinds == [GetSession, FreeSession, SetLease, ApplyEdits]


@pytest.mark.parametrize(
    ("session_id", "status"), [("", 400), ("%0A", 400), ("x" * 257, 400), ("%00", 400)]
)
def test_an_impossible_id_is_a_400(
    server: Server, session_id: str, status: int
) -> None:
    response = ask(server, "GET", f"{SESSIONS}/{session_id}")
    assert response.status == status
    assert response.json["error"]["param"] == "session_id"
    assert server.engine.commands == []


def test_edits_are_applied(server: Server) -> None:
    result = {"type": "evict", "status": "completed"}
    answer = {"session_id": "s", "results": [result]}
    server.engine.answer = lambda command: success(answer)
    body = {
        "edits": [
            {"type": "evict"},
            {"type": "prefetch", "block_start": 0, "block_end": 2},
        ],
        "wait_s": 30,
    }
    response = ask(server, "POST", f"{SESSIONS}/s/edits", body)
    assert (response.status, response.json) == (200, answer)
    assert command_of(server) == ApplyEdits(
        tenant="",
        session_id="s",
        edits=(
            Edit(type=EditType.EVICT),
            Edit(type=EditType.PREFETCH, block_start=0, block_end=2),
        ),
        wait_s=30,
    )


def test_edits_of_an_unknown_session_are_results(server: Server) -> None:
    answer = {"session_id": "s", "results": [{"status": "not_found"}]}
    server.engine.answer = lambda command: success(answer, found=False)
    response = ask(
        server, "POST", f"{SESSIONS}/s/edits", {"edits": [{"type": "evict"}]}
    )
    assert (response.status, response.json) == (200, answer)


def test_edits_that_cannot_run_now_are_rejected_one_by_one(server: Server) -> None:
    server.engine.answer = lambda command: failure("rejected", "asleep")
    response = ask(
        server, "POST", f"{SESSIONS}/s/edits", {"edits": [{"type": "evict"}]}
    )
    assert response.status == 200
    assert response.json["results"][0]["status"] == "rejected"


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "s/edits", {}, "edits"),
        ("POST", "s/edits", {"edits": {}}, "edits"),
        ("POST", "s/edits", {"edits": [{"type": "evict"}] * 17}, "edits"),
        ("POST", "s/edits", {"edits": [{"type": "drop"}]}, "edits.0.type"),
        ("POST", "s/edits", {"edits": [], "wait": 1}, "wait"),
        ("POST", "s/edits", {"edits": [], "\ud800": 1}, "\\ud800"),
        *(
            ("POST", "s/edits", {"edits": [], "wait_s": value}, "wait_s")
            for value in (-1, 60.1, "1", True, None, float("nan"), 10**400, [])
        ),
        ("PUT", "s/lease", {}, "ttl"),
        ("PUT", "s/lease", {"ttl": 3601}, "ttl"),
        ("PUT", "s/lease", {"ttl": "1"}, "ttl"),
        ("PUT", "s/lease", {"ttl": 1, "ttl_s": 1}, "ttl_s"),
        *(
            (
                "PUT",
                "s/lease",
                {"ttl": 1, "expected_resume_s": value},
                "expected_resume_s",
            )
            for value in (-1, 3601, "1", True, float("nan"), 10**400, [])
        ),
        ("PUT", "s/lease", {"expected_resume_s": 5}, "ttl"),
        ("PUT", "s/lease", [], "body"),
        ("PUT", "s/lease", b"", "body"),
        ("PUT", "s/lease", b"{", "body"),
        ("PUT", "s/lease", b"\xff", "body"),
        ("PUT", "s/lease", b"[" * 60_000, "body"),
        ("PUT", "s/lease", b" " * 70_000, "body"),
        ("DELETE", "s?tree=maybe", None, "tree"),
        ("GET", "?limit=0", None, "limit"),
        ("GET", "?limit=1001", None, "limit"),
        ("GET", "?limit=-1", None, "limit"),
        ("GET", "?limit=1e3", None, "limit"),
        ("GET", f"?limit={'9' * 5000}", None, "limit"),
        ("GET", "?limit=%D9%A1", None, "limit"),
        ("GET", "?cursor=", None, "cursor"),
    ],
)
def test_invalid_input_is_a_400_that_names_it(
    server: Server, method: str, path: str, body: Any, param: str
) -> None:
    separator = "" if path.startswith("?") else "/"
    response = ask(server, method, f"{SESSIONS}{separator}{path}", body)
    assert response.status == 400
    error = response.json["error"]
    assert error["param"] == param
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert server.engine.commands == []


def test_a_session_is_shown(server: Server) -> None:
    answer = {"session_id": "s", "lease_s": None, "contexts": []}
    server.engine.answer = lambda command: success(answer)
    response = ask(server, "GET", f"{SESSIONS}/s")
    assert (response.status, response.json) == (200, answer)
    assert command_of(server) == GetSession(tenant="", session_id="s")


def test_sessions_are_listed(server: Server) -> None:
    ask(server, "GET", SESSIONS)
    ask(server, "GET", f"{SESSIONS}?limit=1000&cursor=a%2Fb")
    assert server.engine.commands == [
        ListSessions(tenant="", limit=100),
        ListSessions(tenant="", limit=1000, cursor="a/b"),
    ]


@pytest.mark.parametrize("ttl", [0, 0.5, 3600])
def test_a_lease_is_set(server: Server, ttl: float) -> None:
    assert ask(server, "PUT", f"{SESSIONS}/s/lease", {"ttl": ttl}).status == 200
    assert command_of(server) == SetLease(tenant="", session_id="s", ttl=ttl)


@pytest.mark.parametrize("value", [0, 0.5, 3600, None])
def test_a_lease_may_say_when_the_session_will_be_back(
    server: Server, value: float | None
) -> None:
    body = {"ttl": 5, "expected_resume_s": value}
    assert ask(server, "PUT", f"{SESSIONS}/s/lease", body).status == 200
    assert command_of(server) == SetLease(
        tenant="", session_id="s", ttl=5, expected_resume_s=value
    )


@pytest.mark.parametrize(
    ("query", "tree"),
    [("", False), ("?tree=true", True), ("?tree=1", True), ("?tree=false", False)],
)
def test_a_session_is_freed(server: Server, query: str, tree: bool) -> None:
    ask(server, "DELETE", f"{SESSIONS}/s{query}")
    assert command_of(server) == FreeSession(tenant="", session_id="s", tree=tree)


def test_an_operation_is_shown(server: Server) -> None:
    ask(server, "GET", "/v1/agent/operations/op-1")
    assert command_of(server) == GetOperation(tenant="", operation_id="op-1")
    assert ask(server, "GET", f"/v1/agent/operations/{'x' * 65}").status == 400


def test_stats_and_reset(server: Server) -> None:
    server.engine.answer = lambda command: success({"sessions": 3})
    assert ask(server, "GET", "/v1/agent/stats").json == {"sessions": 3}
    assert ask(server, "POST", "/v1/agent/reset").status == 200
    assert server.engine.commands == [GetStats(), Reset()]


NAMED = [
    ("GET", f"{SESSIONS}/s", None),
    ("DELETE", f"{SESSIONS}/s", None),
    ("PUT", f"{SESSIONS}/s/lease", {"ttl": 1}),
    ("GET", "/v1/agent/operations/op-1", None),
]
EVERY = [
    *NAMED,
    ("POST", f"{SESSIONS}/s/edits", {"edits": [{"type": "evict"}]}),
    ("GET", SESSIONS, None),
    ("GET", "/v1/agent/stats", None),
    ("POST", "/v1/agent/reset", None),
]


@pytest.mark.parametrize(("method", "path", "body"), NAMED)
def test_what_is_not_known_is_a_404(
    server: Server, method: str, path: str, body: object
) -> None:
    server.engine.answer = lambda command: success(None, found=False)
    response = ask(server, method, path, body)
    assert response.status == 404
    assert response.json["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize(("method", "path", "body"), EVERY)
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (failure("unavailable", "no connector"), 503),
        (failure("invalid", "unknown command"), 400),
        (RuntimeError("died"), 503),
        ("no reply", 503),
    ],
)
def test_a_failing_engine_is_never_a_500(
    server: Server, method: str, path: str, body: object, answer: Any, status: int
) -> None:
    server.engine.answer = lambda command: answer
    response = ask(server, method, path, body)
    assert response.status == status
    assert response.json["error"]["code"] == status


@pytest.mark.parametrize(("method", "path", "body"), NAMED)
def test_a_paused_engine_is_a_409(
    server: Server, method: str, path: str, body: object
) -> None:
    server.engine.answer = lambda command: failure("rejected", "asleep")
    assert ask(server, method, path, body).status == 409


def test_a_server_without_an_engine_is_a_503(server: Server) -> None:
    del server.app.state.engine_client
    assert ask(server, "GET", SESSIONS).status == 503


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", f"{SESSIONS}/s"),
        ("POST", SESSIONS),
        ("GET", "/v1/agent/reset"),
        ("GET", "/v1/agent/unknown"),
        ("PUT", f"{SESSIONS}/s"),
    ],
)
def test_other_methods_and_paths_are_the_application_s(
    server: Server, method: str, path: str
) -> None:
    assert ask(server, method, path).status in (404, 405)


def test_each_key_sees_its_own_sessions() -> None:
    server = make_server(api_key="k1")
    for value in ("k1", "k2"):
        headers = {"authorization": f"Bearer {value}"}
        for method, path, body in EVERY:
            call(server.app, method, path, body, headers)
    half = len(EVERY)
    for first, second in zip(
        server.engine.commands[:half], server.engine.commands[half:], strict=True
    ):
        wire = json.loads(first.encode())
        if "tenant" in wire:
            assert wire["tenant"]
            assert wire["tenant"] != json.loads(second.encode())["tenant"]


def test_root_path_is_respected() -> None:
    server = make_server(root_path="/api")
    response = call(server.app, "GET", f"/api{SESSIONS}/a%2Fb", b"", root_path="/api")
    assert response.status == 200
    assert command_of(server) == GetSession(tenant="", session_id="a/b")
