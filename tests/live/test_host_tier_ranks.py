"""The host tier with two ranks: what one has is of use only if the other has it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.live.host_tier import (
    BLOCK_BYTES,
    CONTEXT_TOKENS,
    NUM_BLOCKS,
    begin,
    blocks_of,
    counted,
    digests,
    displace,
    edit,
    gate_of,
    new_prompt,
    outcome,
    tokens_of,
    wipe,
    with_tier,
)
from tests.live.server import LiveServer, cached_tokens

NUM_RANKS = 2
LAST_RANK = str(NUM_RANKS - 1)


@pytest.fixture(scope="module")
def ranks_server() -> Iterator[LiveServer]:
    """Two tensor-parallel ranks, each with half of the heads of every block."""
    args = ["--tensor-parallel-size", str(NUM_RANKS)]
    with with_tier(extra_args=args) as server:
        yield server


def test_log_says_what_there_is(ranks_server: LiveServer) -> None:
    log = ranks_server.log_text()
    tier = re.findall(r"host tier: \d+ blocks of \d+ tokens, .* on 2 rank", log)
    ranks = re.findall(r"host tier: \d+ slots of \d+ bytes on rank [01]", log)
    assert (len(tier), len(ranks)) == (1, 2)


def test_displaced_session_comes_back_on_every_rank(ranks_server: LiveServer) -> None:
    server, prompt = ranks_server, new_prompt()
    server.reset_prefix_cache()
    wipe(server)
    first = server.complete(prompt, hint={"session_id": "s"})
    computed = digests(server)
    assert [len(blocks) for blocks in computed] == [NUM_BLOCKS + 1] * NUM_RANKS
    warm = cached_tokens(server.complete(prompt, hint={"session_id": "s"}))
    assert warm == CONTEXT_TOKENS

    offload = edit(server, "s", "offload")
    assert offload["status"] == "completed"
    assert offload["bytes"] == NUM_BLOCKS * BLOCK_BYTES
    assert offload["blocks"]["done"] == NUM_BLOCKS
    assert offload["blocks"]["reclaimed"] == NUM_BLOCKS
    displace(server)
    assert blocks_of(server, "s") == {"gpu": 0, "host": NUM_BLOCKS}

    wipe(server)
    assert edit(server, "s", "prefetch")["status"] == "completed"
    restored = digests(server)
    assert [len(blocks) for blocks in restored] == [NUM_BLOCKS] * NUM_RANKS
    for before, after in zip(computed, restored, strict=True):
        assert after < before
    assert computed[0].isdisjoint(computed[1])
    answer = server.complete(prompt, hint={"session_id": "s"})
    assert cached_tokens(answer) == warm
    assert tokens_of(answer) == tokens_of(first)
    server.reset_prefix_cache()


def test_request_is_served_from_the_tier(ranks_server: LiveServer) -> None:
    server, prompt = ranks_server, new_prompt()
    first = server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    with counted(server, "external_hit_tokens") as risen:
        answer = server.complete(prompt)
    assert risen == {"external_hit_tokens": CONTEXT_TOKENS}
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == tokens_of(first)


@pytest.mark.parametrize("kind", ["offload", "prefetch"])
def test_edit_ends_when_the_last_rank_is_done(
    ranks_server: LiveServer, kind: str
) -> None:
    server, prompt = ranks_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    if kind == "prefetch":
        edit(server, "s", "offload")
        displace(server)
    before = blocks_of(server, "s")
    with gate_of(server, rank=LAST_RANK) as gate:
        gate.hold()
        operation = begin(server, "s", kind)
        gate.wait_for_held()
        assert list(gate.held()) == [0, 1]
        # Steps of other work do not end it either.
        server.complete(new_prompt(40))
        assert server.stats()["jobs_in_flight"] == 1
        assert blocks_of(server, "s") == before
        gate.open()
        assert outcome(server, operation)["status"] == "completed"
    where = "host" if kind == "offload" else "gpu"
    assert blocks_of(server, "s")[where] == NUM_BLOCKS


@pytest.mark.parametrize("kind", ["offload", "prefetch"])
def test_failure_of_one_rank_fails_all(ranks_server: LiveServer, kind: str) -> None:
    server, prompt = ranks_server, new_prompt()
    first = server.complete(prompt, hint={"session_id": "s"})
    if kind == "prefetch":
        edit(server, "s", "offload")
        displace(server)
    with gate_of(server, rank=LAST_RANK) as gate:
        gate.fail_next()
        result = edit(server, "s", kind)
    assert result["status"] == "rejected"
    assert "failed on purpose" in result["reason"]
    assert result["blocks"]["missing"] == NUM_BLOCKS
    answer = server.complete(prompt)
    assert cached_tokens(answer) == (CONTEXT_TOKENS if kind == "offload" else 0)
    assert tokens_of(answer) == tokens_of(first)


def test_load_that_fails_on_one_rank_is_computed(ranks_server: LiveServer) -> None:
    server, prompt = ranks_server, new_prompt()
    first = server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    with (
        counted(server, "failed_copies") as risen,
        gate_of(server, rank=LAST_RANK) as gate,
    ):
        gate.fail_next()
        answer = server.complete(prompt)
    assert risen == {"failed_copies": 1}
    assert cached_tokens(answer) == 0
    assert tokens_of(answer) == tokens_of(first)
