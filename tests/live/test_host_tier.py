"""The host tier behind a real server: bytes, tokens, policies, and full pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.live.endpoints import COMPLETIONS, managing, session_of
from tests.live.host_tier import (
    BLOCK_BYTES,
    CONTEXT_TOKENS,
    NUM_BLOCKS,
    POOL,
    blocks_of,
    counted,
    digests,
    displace,
    displace_by_sessions,
    edit,
    gate_of,
    new_prompt,
    outcome,
    tokens_of,
    wipe,
    with_tier,
)
from tests.live.server import (
    BLOCK_SIZE,
    MODEL_NAME,
    LiveServer,
    cached_tokens,
    free_all_sessions,
)

#: Slots of the tier that is soon full.
FEW_SLOTS = 14
TOLERANCE = 1e-4
LEASE = {"cache_control": {"ttl": 600}}


@pytest.fixture(scope="module")
def saving_server() -> Iterator[LiveServer]:
    """Saves everything, a block or two at a time."""
    config = {"save_policy": "all", "max_inflight_bytes": 2 * BLOCK_BYTES}
    with with_tier(config=config) as server:
        yield server


@pytest.fixture(scope="module")
def asked_server() -> Iterator[LiveServer]:
    """Saves only what it is asked to, and has room for little."""
    config = {"save_policy": "on_demand", "host_bytes": FEW_SLOTS * BLOCK_BYTES}
    with with_tier(config=config) as server:
        yield server


# --- there and back -------------------------------------------------------------------


def test_displaced_session_comes_back_by_prefetch(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt()
    expected = tokens_of(stock_server.complete(prompt))
    server.reset_prefix_cache()
    wipe(server)
    answer = server.complete(prompt, hint={"session_id": "s"})
    assert tokens_of(answer) == expected
    (computed,) = digests(server)
    assert len(computed) == NUM_BLOCKS + 1  # the last one is not full
    warm = cached_tokens(server.complete(prompt, hint={"session_id": "s"}))
    assert warm == CONTEXT_TOKENS
    assert blocks_of(server, "s") == {"gpu": NUM_BLOCKS, "host": 0}

    offload = edit(server, "s", "offload")
    assert offload["status"] == "completed"
    assert offload["bytes"] == NUM_BLOCKS * BLOCK_BYTES
    assert offload["blocks"] == {
        "requested": NUM_BLOCKS,
        "done": NUM_BLOCKS,
        "already": 0,
        "missing": 0,
        "reclaimed": NUM_BLOCKS,
    }
    assert blocks_of(server, "s")["host"] == NUM_BLOCKS
    displace(server)
    assert blocks_of(server, "s") == {"gpu": 0, "host": NUM_BLOCKS}

    wipe(server)
    prefetch = edit(server, "s", "prefetch")
    assert prefetch["status"] == "completed"
    assert prefetch["blocks"]["done"] == NUM_BLOCKS
    assert prefetch["bytes"] == NUM_BLOCKS * BLOCK_BYTES
    assert blocks_of(server, "s") == {"gpu": NUM_BLOCKS, "host": NUM_BLOCKS}
    (restored,) = digests(server)
    assert len(restored) == NUM_BLOCKS
    assert restored < computed

    with counted(server, "external_hit_requests", "loaded_bytes") as risen:
        answer = server.complete(prompt, hint={"session_id": "s"})
    assert tokens_of(answer) == expected
    assert cached_tokens(answer) == warm
    assert risen == {"external_hit_requests": 0, "loaded_bytes": 0}
    # Other contents that the engine still believes to have were wiped.
    server.reset_prefix_cache()


def test_prefetch_of_what_is_there_copies_nothing(tier_server: LiveServer) -> None:
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    with counted(server, "loaded_bytes") as risen:
        result = edit(server, "s", "prefetch")
    assert result["status"] == "completed"
    assert result["blocks"]["already"] == NUM_BLOCKS
    assert risen == {"loaded_bytes": 0}
    with counted(server, "saved_bytes") as risen:
        result = edit(server, "s", "offload")
    assert result["status"] == "completed"
    assert result["blocks"]["already"] == NUM_BLOCKS
    assert risen == {"saved_bytes": 0}


def test_edits_of_a_request_are_carried_out_when_it_ends(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """Offload in the hint of a turn, prefetch by a call that runs no model."""
    server, prompt = tier_server, new_prompt()
    edits = {"context_management": {"edits": [{"type": "offload"}]}}
    answer = server.complete(prompt, hint={"session_id": "s", **edits})
    (result,) = answer["kv_transfer_params"]["agent_hint"]["results"]
    assert result["status"] == "accepted"
    offload = outcome(server, result["operation_id"])
    assert offload["status"] == "completed"
    assert offload["blocks"]["reclaimed"] == NUM_BLOCKS
    displace(server)
    managed = server.post(
        COMPLETIONS, {"model": MODEL_NAME, "agent_hint": managing("s", "prefetch")}
    )
    assert managed.status_code == 200, managed.text
    answer = server.complete(prompt)
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


# --- ordinary requests ----------------------------------------------------------------


def test_request_is_served_from_the_tier_after_an_offload(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    with counted(server, "external_hit_requests", "external_hit_tokens") as risen:
        answer = server.complete(prompt)
    assert risen == {"external_hit_requests": 1, "external_hit_tokens": CONTEXT_TOKENS}
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


def test_prompt_of_whole_blocks_leaves_one_to_compute(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt(CONTEXT_TOKENS)
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    answer = server.complete(prompt)
    assert cached_tokens(answer) == CONTEXT_TOKENS - BLOCK_SIZE
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


def test_prompt_that_the_tier_has_in_part(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    longer = [*prompt[: 5 * BLOCK_SIZE], *new_prompt()]
    answer = server.complete(longer)
    assert cached_tokens(answer) == 5 * BLOCK_SIZE
    assert tokens_of(answer) == tokens_of(stock_server.complete(longer))


def test_cache_salt_keeps_contents_apart(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt()
    expected = tokens_of(stock_server.complete(prompt))
    server.complete(prompt, hint={"session_id": "s"}, cache_salt="one")
    edit(server, "s", "offload")
    displace(server)
    for salt, tokens in [("two", 0), ("one", CONTEXT_TOKENS)]:
        answer = server.complete(prompt, cache_salt=salt)
        assert cached_tokens(answer) == tokens
        assert tokens_of(answer) == expected


def test_prompt_logprobs_are_computed_and_not_loaded(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    with counted(server, "external_hit_requests", "loaded_bytes") as risen:
        answer = server.complete(prompt, prompt_logprobs=1)
    assert risen == {"external_hit_requests": 0, "loaded_bytes": 0}
    assert cached_tokens(answer) == 0
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))
    expected = _logprobs(stock_server.complete(prompt, prompt_logprobs=1))
    assert _logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)


def _logprobs(answer: Mapping[str, Any]) -> list[float]:
    """The logprob of each prompt token; the first has none."""
    tokens = answer["choices"][0]["prompt_token_ids"]
    rows = answer["choices"][0]["prompt_logprobs"]
    pairs = zip(tokens, rows, strict=True)
    return [0.0 if row is None else row[str(token)]["logprob"] for token, row in pairs]


# --- what is saved --------------------------------------------------------------------


def test_hinted_saves_sessions_before_they_are_lost(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    assert blocks_of(server, "s") == {"gpu": NUM_BLOCKS, "host": 0}
    # Sessions push each other out; which goes first is not the point here.
    while blocks_of(server, "s")["gpu"]:
        displace_by_sessions(server, 1)
    assert blocks_of(server, "s")["host"] == NUM_BLOCKS
    answer = server.complete(prompt)
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


def test_hinted_saves_nothing_of_requests_without_a_session(
    tier_server: LiveServer,
) -> None:
    prompt = new_prompt()
    with counted(tier_server, "saved_bytes") as risen:
        tier_server.complete(prompt)
        displace(tier_server)
        assert cached_tokens(tier_server.complete(prompt)) == 0
    assert risen == {"saved_bytes": 0}


@pytest.mark.parametrize("hint", [None, {"session_id": "s"}], ids=["plain", "session"])
def test_all_saves_every_request(
    saving_server: LiveServer,
    stock_server: LiveServer,
    hint: dict[str, object] | None,
) -> None:
    server, prompt = saving_server, new_prompt()
    with counted(server, "saved_bytes") as risen:
        server.complete(prompt, hint=hint)
    assert risen == {"saved_bytes": NUM_BLOCKS * BLOCK_BYTES}
    if hint:
        assert blocks_of(server, "s") == {"gpu": NUM_BLOCKS, "host": NUM_BLOCKS}
    displace(server)
    with counted(server, "external_hit_tokens") as risen:
        answer = server.complete(prompt)
    assert risen == {"external_hit_tokens": CONTEXT_TOKENS}
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


def test_on_demand_saves_nothing_by_itself(asked_server: LiveServer) -> None:
    server, prompt = asked_server, new_prompt()
    with counted(server, "saved_bytes") as risen:
        server.complete(prompt, hint={"session_id": "s", **LEASE})
        displace_by_sessions(server)
        displace(server)
        assert blocks_of(server, "s")["host"] == 0
        assert cached_tokens(server.complete(prompt)) == 0
    assert risen == {"saved_bytes": 0}


# --- full pools -----------------------------------------------------------------------


def test_tier_gives_up_what_nobody_leases_for_an_offload(
    asked_server: LiveServer, stock_server: LiveServer
) -> None:
    server = asked_server
    prompts = {name: new_prompt() for name in ("first", "second")}
    for name, prompt in prompts.items():
        server.complete(prompt, hint={"session_id": name})
        assert edit(server, name, "offload")["status"] == "completed"
    assert blocks_of(server, "second")["host"] == NUM_BLOCKS
    # The tail went first: what is left is a prefix, and still of use.
    assert blocks_of(server, "first")["host"] == FEW_SLOTS - NUM_BLOCKS
    displace(server)
    for name, num_blocks in (("first", FEW_SLOTS - NUM_BLOCKS), ("second", NUM_BLOCKS)):
        answer = server.complete(prompts[name])
        assert cached_tokens(answer) == num_blocks * BLOCK_SIZE
        assert tokens_of(answer) == tokens_of(stock_server.complete(prompts[name]))


def test_offload_into_a_tier_full_of_leases(
    asked_server: LiveServer, stock_server: LiveServer
) -> None:
    server, prompt = asked_server, new_prompt()
    server.complete(new_prompt(), hint={"session_id": "leased", **LEASE})
    assert edit(server, "leased", "offload")["status"] == "completed"
    server.complete(prompt, hint={"session_id": "s"})
    result = edit(server, "s", "offload")
    assert result["status"] == "partial"
    assert result["reason"] == "the host tier is full of leased contexts"
    assert result["blocks"]["done"] == FEW_SLOTS - NUM_BLOCKS
    # Not safe elsewhere, so nothing was given up here.
    assert result["blocks"]["reclaimed"] == 0
    assert blocks_of(server, "s")["gpu"] == NUM_BLOCKS
    assert blocks_of(server, "leased")["host"] == NUM_BLOCKS
    displace(server)
    answer = server.complete(prompt)
    assert cached_tokens(answer) == (FEW_SLOTS - NUM_BLOCKS) * BLOCK_SIZE
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


def test_prefetch_into_a_pool_full_of_leases(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    """What others lease is left alone; the request is served all the same."""
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    displace(server)
    # As much as leases may protect.
    leased = {"one": 15, "other": 16}
    for name, num_blocks in leased.items():
        more = new_prompt(num_blocks * BLOCK_SIZE + 1)
        server.complete(more, max_tokens=2, hint={"session_id": name, **LEASE})
    result = edit(server, "s", "prefetch")
    assert result["status"] == "partial"
    assert result["reason"] == "no room in the engine's cache beyond the reserve"
    assert {name: blocks_of(server, name)["gpu"] for name in leased} == leased
    answer = server.complete(prompt)
    assert cached_tokens(answer) == CONTEXT_TOKENS
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompt))


def test_prefetch_while_a_request_has_the_whole_pool(
    tier_server: LiveServer, stock_server: LiveServer
) -> None:
    server = tier_server
    prompts = {"s": new_prompt(), "large": new_prompt((POOL - 5) * BLOCK_SIZE + 1)}
    for name, prompt in prompts.items():
        server.complete(prompt, hint={"session_id": name})
        assert edit(server, name, "offload")["status"] == "completed"
    displace(server)
    with gate_of(server) as gate, ThreadPoolExecutor(1) as pool:
        gate.hold()
        request = pool.submit(server.complete, prompts["large"])
        gate.wait_for_held()
        gate.pass_new()
        result = edit(server, "s", "prefetch")
        gate.open()
        answer = request.result()
    assert result["status"] == "rejected"
    assert result["reason"] == "no room in the engine's cache beyond the reserve"
    assert cached_tokens(answer) == (POOL - 5) * BLOCK_SIZE
    assert tokens_of(answer) == tokens_of(stock_server.complete(prompts["large"]))
    answer = server.complete(prompts["s"])
    assert cached_tokens(answer) == CONTEXT_TOKENS


def test_forgotten_session_leaves_the_tier_to_others(tier_server: LiveServer) -> None:
    server, prompt = tier_server, new_prompt()
    server.complete(prompt, hint={"session_id": "s"})
    edit(server, "s", "offload")
    assert server.stats()["host_held_slots"] >= NUM_BLOCKS
    free_all_sessions(server)
    assert session_of(server, "s") is None
    assert server.stats()["host_held_slots"] == 0
    # Its content is still there, and of use until others need the place.
    displace(server)
    assert cached_tokens(server.complete(prompt)) == CONTEXT_TOKENS
