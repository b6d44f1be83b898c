"""Servers with a host tier, and what their tests ask of them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.live.endpoints import session_of, session_path
from tests.live.server import BLOCK_SIZE, LiveServer, wait_until_idle
from tests.live.worker_probe import ALL_RANKS, EXTENSION

#: Blocks of the pools that a few prompts fill; one of them is the null block.
POOL = 40
#: Of ``TEST_MODEL``: keys and values of four layers, 32 tokens and 256 numbers each.
BLOCK_BYTES = 4 * 2 * BLOCK_SIZE * 256 * 4
HOST_BYTES = 256 * BLOCK_BYTES

#: A context of nine full blocks and a bit.
NUM_BLOCKS = 9
CONTEXT_TOKENS = NUM_BLOCKS * BLOCK_SIZE
PROMPT_TOKENS = CONTEXT_TOKENS + 12

_WAIT_S = 20.0
_numbers = iter(range(1_000_000))


def with_tier(*, num_blocks: int = POOL, **more: Any) -> LiveServer:
    """A server with a host tier whose workers do what tests tell them."""
    config = {"host_bytes": HOST_BYTES, **more.pop("config", {})}
    extra_args = ["--worker-extension-cls", EXTENSION, *more.pop("extra_args", ())]
    return LiveServer(
        config=config, num_blocks=num_blocks, extra_args=extra_args, **more
    )


# --- requests -------------------------------------------------------------------------


def new_prompt(num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Tokens that no other prompt begins with."""
    return random.Random(next(_numbers)).choices(range(10, 1000), k=num_tokens)


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def displace(server: LiveServer, num_blocks: int = POOL - 1) -> None:
    """Other traffic: one request that wants the whole pool."""
    server.complete(new_prompt(num_blocks * BLOCK_SIZE - 8), max_tokens=2)


def displace_by_sessions(server: LiveServer, count: int = 7) -> None:
    """Other traffic: sessions that push each other out, one after the other."""
    for _ in range(count):
        name = f"other-{next(_numbers)}"
        server.complete(new_prompt(), max_tokens=2, hint={"session_id": name})


# --- edits ----------------------------------------------------------------------------


def edit(
    server: LiveServer, session_id: str, kind: str, *, wait_s: float = _WAIT_S
) -> dict[str, Any]:
    """Asks for one edit; its result once it has ended, or after ``wait_s``."""
    body = {"edits": [{"type": kind}], "wait_s": wait_s}
    answer = server.post(f"{session_path(session_id)}/edits", body)
    assert answer.status_code in (200, 404), answer.text
    (result,) = answer.json()["results"]
    return dict(result)


def begin(server: LiveServer, session_id: str, kind: str) -> str:
    """Asks for an edit that takes time; returns the id of its operation."""
    result = edit(server, session_id, kind, wait_s=0)
    assert result["status"] == "accepted", result
    return str(result["operation_id"])


def outcome(server: LiveServer, operation_id: str) -> dict[str, Any]:
    """The result of an operation, once it has ended."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(server.get(f"/v1/agent/operations/{operation_id}").json())
        return bool(found["status"] != "accepted")

    wait_for(has_ended, f"the end of {operation_id}")
    return found


def blocks_of(server: LiveServer, session_id: str) -> dict[str, int]:
    """Where the blocks of a session are."""
    session = session_of(server, session_id)
    assert session is not None
    return {name: session["blocks"][name] for name in ("gpu", "host")}


@contextlib.contextmanager
def counted(server: LiveServer, *names: str) -> Iterator[dict[str, int]]:
    """By how much counters have risen, filled in on leaving."""
    risen: dict[str, int] = {}
    before = server.stats()
    yield risen
    wait_until_idle(server)
    after = server.stats()
    risen.update({name: after[name] - before[name] for name in names})


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {_WAIT_S:.0f} s for {what}")
        time.sleep(0.02)


# --- workers --------------------------------------------------------------------------


def on_workers(server: LiveServer, method: str, *args: str) -> list[Any]:
    """Calls a method of ``WorkerProbe`` on every rank."""
    body = {"method": f"sam_test_{method}", "args": list(args)}
    answer = server.post("/collective_rpc", body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["results"])


def digests(server: LiveServer) -> list[set[str]]:
    """Per rank: digests of the blocks written since the last ``wipe``."""
    return [set(by_block.values()) for by_block in on_workers(server, "digests")]


def wipe(server: LiveServer) -> None:
    """Zeros in all KV memory; what the engine believes to be cached is lost."""
    on_workers(server, "wipe")


class Gate:
    """Holds up the copies of a server.

    Args:
        server: whose.
        rank: the only one that is held up.
    """

    def __init__(self, server: LiveServer, rank: str) -> None:
        self._server = server
        self._rank = rank

    def hold(self) -> None:
        on_workers(self._server, "hold", self._rank)

    def pass_new(self) -> None:
        on_workers(self._server, "pass")

    def fail_next(self) -> None:
        on_workers(self._server, "fail_next", self._rank)

    def open(self) -> None:
        on_workers(self._server, "open")

    def wait_for_held(self, count: int = 1) -> None:
        wait_for(lambda: sum(self.held()) >= count, f"{count} copies to be held")

    def held(self) -> Sequence[int]:
        """Copies that are held, by rank."""
        return [told["held"] for told in on_workers(self._server, "held")]


@contextlib.contextmanager
def gate_of(server: LiveServer, *, rank: str = ALL_RANKS) -> Iterator[Gate]:
    """A gate; on leaving everything passes and the server is idle."""
    gate = Gate(server, rank)
    try:
        yield gate
    finally:
        gate.open()
        wait_until_idle(server)
        on_workers(server, "remove_gate")
