"""Servers with a store behind the host tier, and what their tests ask of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.live.host_tier import edit, new_prompt, tokens_of, wait_for
from tests.live.server import BLOCK_SIZE, LiveServer, cached_tokens

#: A pool in which nothing is lost for want of room.
POOL = 160
HOST_BYTES = 64 << 20
NUM_BLOCKS = 20
PROMPT_TOKENS = NUM_BLOCKS * BLOCK_SIZE + 12


def with_store(url: str, **more: Any) -> LiveServer:
    """A server with a store; quick to give up and to try again."""
    config = {
        "host_bytes": HOST_BYTES,
        "store": url,
        # The machine may be busy; what a deadline is for is tested where it is silent.
        "store_lookup_timeout_s": 2.0,
        "store_timeout_s": 1.0,
        "store_load_timeout_s": 3.0,
        **more.pop("config", {}),
    }
    return LiveServer(config=config, num_blocks=POOL, **more)


def forget(server: LiveServer) -> None:
    """Empties the server's own caches; what it has stored stays."""
    answer = server.post("/v1/agent/reset?keep_store=true")
    assert answer.status_code == 200, answer.text
    wait_for(
        lambda: bool(server.post("/reset_prefix_cache").json()["success"]),
        "the prefix cache to be empty",
    )
    assert server.stats()["host_used_slots"] == 0


class Session:
    """A conversation, with what it was answered.

    Args:
        name: its id.
        num_tokens: of its prompt.
    """

    def __init__(self, name: str, num_tokens: int = PROMPT_TOKENS) -> None:
        self.name = name
        self.prompt = new_prompt(num_tokens)
        self.tokens: list[int] = []

    @property
    def num_block_tokens(self) -> int:
        return len(self.prompt) // BLOCK_SIZE * BLOCK_SIZE

    def serve(self, server: LiveServer) -> None:
        """The first turn, whose answer all others must equal."""
        self.tokens = tokens_of(server.complete(self.prompt, hint=self.hint))

    def again(self, server: LiveServer, *, by_name: bool = True) -> int:
        """The same turn; tokens must be the same. Returns how many were cached."""
        hint = self.hint if by_name else None
        answer = server.complete(self.prompt, hint=hint)
        assert tokens_of(answer) == self.tokens
        return cached_tokens(answer)

    @property
    def hint(self) -> dict[str, object]:
        return {
            "session_id": self.name,
            "cache_control": {"type": "ephemeral", "ttl": 300},
        }


def offloaded(server: LiveServer, name: str) -> Session:
    """A session that the store has; the server's own memory is empty."""
    session = Session(name)
    session.serve(server)
    wait_for(
        lambda: edit(server, name, "offload")["status"] == "completed",
        "the store to take a session",
    )
    forget(server)
    return session


@contextlib.contextmanager
def log_of(server: LiveServer) -> Iterator[list[str]]:
    """Our lines about the store's state since then, filled in on leaving."""
    lines: list[str] = []
    start = len(server.log_text())
    yield lines
    lines += [
        line
        for line in server.log_text()[start:].splitlines()
        if "out of service" in line or "in service again" in line
    ]


def is_in_service(server: LiveServer) -> bool:
    """Whether the scheduler's side of the store is; asked, so that it finds out."""
    edit(server, "nobody-knows-me", "prefetch")
    return bool(server.stats()["store_breaker_state"] == "closed")


def bring_back(server: LiveServer, session: Session) -> None:
    """Waits until the store serves again, by the ranks as well, without a restart."""
    wait_for(lambda: is_in_service(server), "the store to be in service")

    def is_back() -> bool:
        forget(server)
        edit(server, session.name, "prefetch")
        return session.again(server) == session.num_block_tokens

    wait_for(is_back, "hits from the store")


def states(lines: Sequence[str]) -> list[str]:
    return ["out" if "out of" in line else "in" for line in lines]
