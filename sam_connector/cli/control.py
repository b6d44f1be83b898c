"""Commands that look into a running server: one HTTP call each."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sam_connector.cli.http import ControlClient, session_path

if TYPE_CHECKING:
    from sam_connector.cli.parsers import Commands

DEFAULT_URL = "http://127.0.0.1:8000"
_PAGE_SIZE = 500
_DONE = ("completed", "accepted")


def add_commands(commands: Commands) -> None:
    server = _server_options()
    sessions = commands.add_parser(
        "sessions", parents=[server], help="list the sessions a server knows"
    )
    sessions.add_argument("--json", action="store_true", help="one object a line")
    sessions.set_defaults(run=list_sessions)

    show = commands.add_parser("show", parents=[server], help="all about one session")
    show.add_argument("session_id", metavar="SESSION")
    show.set_defaults(run=show_session)

    for verb, text in (
        ("evict", "give a session's cache up, in every tier"),
        ("offload", "copy a session's cache out of the GPU, then release it"),
        ("prefetch", "load a session's cache before it resumes"),
    ):
        edit = commands.add_parser(verb, parents=[server], help=text)
        edit.add_argument("session_id", metavar="SESSION")
        edit.add_argument(
            "--wait",
            type=float,
            default=0.0,
            metavar="S",
            help="wait for the end, at most 60 s",
        )
        edit.set_defaults(run=apply_edit, edit_type=verb)

    reset = commands.add_parser(
        "reset", parents=[server], help="forget what is known of cached content"
    )
    reset.add_argument(
        "--keep-store",
        action="store_true",
        help="only what is in the server's own memory, not what it has stored",
    )
    reset.set_defaults(run=reset_server)


def list_sessions(options: argparse.Namespace) -> int:
    if not options.json:
        print(_line("SESSION", "CONTEXTS", "TOKENS", "GPU", "HOST", "STORE", "LEASE S"))
    for session in _all_sessions(_client(options)):
        print(json.dumps(session) if options.json else _session_line(session))
    return 0


def show_session(options: argparse.Namespace) -> int:
    _print(_client(options).call("GET", session_path(options.session_id)))
    return 0


def apply_edit(options: argparse.Namespace) -> int:
    """Exit status 1 unless the edit was completed or accepted."""
    answer = _client(options).call(
        "POST",
        f"{session_path(options.session_id)}/edits",
        body={"edits": [{"type": options.edit_type}], "wait_s": options.wait},
        extra_timeout_s=options.wait,
    )
    _print(answer)
    return int(any(result["status"] not in _DONE for result in answer["results"]))


def reset_server(options: argparse.Namespace) -> int:
    query = "?keep_store=true" if options.keep_store else ""
    _print(_client(options).call("POST", f"/reset{query}"))
    return 0


def _all_sessions(client: ControlClient) -> Iterator[dict[str, Any]]:
    query: dict[str, object] = {"limit": _PAGE_SIZE}
    while True:
        page = client.call("GET", "/sessions", query=query)
        yield from page["sessions"]
        if not page.get("cursor"):
            return
        query["cursor"] = page["cursor"]


def _session_line(session: Mapping[str, Any]) -> str:
    contexts, blocks, lease_s = (
        session["contexts"],
        session["blocks"],
        session["lease_s"],
    )
    return _line(
        session["session_id"],
        len(contexts),
        sum(context["num_tokens"] for context in contexts),
        blocks["gpu"],
        blocks["host"],
        blocks["store"],
        "-" if lease_s is None else f"{lease_s:.0f}",
    )


def _line(session_id: str, *columns: object) -> str:
    return f"{session_id:40} " + " ".join(f"{column!s:>8}" for column in columns)


def _print(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer, indent=2))


def _client(options: argparse.Namespace) -> ControlClient:
    return ControlClient(url=options.url, api_key=options.api_key)


def _server_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--url",
        default=os.environ.get("SAM_URL", DEFAULT_URL),
        help=f"the server (SAM_URL, {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="the server's API key (VLLM_API_KEY)",
    )
    return parser
