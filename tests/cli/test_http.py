from __future__ import annotations

import pytest

from benchmarks.common import free_port
from sam_connector.cli.errors import CommandError
from sam_connector.cli.http import ControlClient, session_path
from tests.cli.conftest import ControlServer


def test_sends_key_query_and_body(control_server: ControlServer) -> None:
    control_server.will_answer({"ok": 1})
    client = ControlClient(url=control_server.url, api_key="secret")
    answer = client.call("POST", "/reset", body={"a": 1}, query={"limit": 3})
    assert answer == {"ok": 1}
    (asked,) = control_server.asked
    assert asked.method == "POST"
    assert asked.path == "/v1/agent/reset?limit=3"
    assert asked.authorization == "Bearer secret"
    assert asked.body == {"a": 1}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_takes_the_url_as_clients_write_it(
    control_server: ControlServer, suffix: str
) -> None:
    control_server.will_answer({})
    ControlClient(url=control_server.url + suffix).call("GET", "/stats")
    assert control_server.asked[0].path == "/v1/agent/stats"
    assert control_server.asked[0].authorization is None


def test_ids_are_encoded_whole() -> None:
    assert session_path("a/b c?#%é") == "/sessions/a%2Fb%20c%3F%23%25%C3%A9"


def test_error_message_of_the_server_is_shown(control_server: ControlServer) -> None:
    control_server.will_answer({"error": {"message": "ttl: too long"}}, status=400)
    with pytest.raises(CommandError, match=r"^ttl: too long \(HTTP 400\)$"):
        ControlClient(url=control_server.url).call("GET", "/stats")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b'{"error": "Unauthorized"}', "--api-key"),
        (404, b'{"detail": "Not Found"}', "AgentHintMiddleware"),
        (500, b"oops", "answered HTTP 500"),
        (502, b'{"error": {"message": 3}}', "answered HTTP 502"),
    ],
)
def test_other_errors_say_what_to_do(
    control_server: ControlServer, status: int, body: bytes, message: str
) -> None:
    control_server.will_answer(body, status=status)
    with pytest.raises(CommandError, match=message):
        ControlClient(url=control_server.url).call("GET", "/stats")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"3"])
def test_an_answer_that_is_no_object(
    control_server: ControlServer, body: bytes
) -> None:
    control_server.will_answer(body)
    with pytest.raises(CommandError, match=r"not (JSON|a JSON object)"):
        ControlClient(url=control_server.url).call("GET", "/stats")


def test_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CommandError, match=f"cannot reach {url}: .*refused"):
        ControlClient(url=url).call("GET", "/stats")


@pytest.mark.parametrize("url", ["", "localhost:8000", "file:///etc/passwd", "http://"])
def test_refuses_what_is_no_http_url(url: str) -> None:
    with pytest.raises(CommandError, match="no http"):
        ControlClient(url=url)
