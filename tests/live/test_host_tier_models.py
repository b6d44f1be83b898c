"""The host tier behind servers with a drafter, with an 8-bit cache; refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from tests.live.endpoints import CHAT, COMPLETIONS, body_of, session_of
from tests.live.host_tier import (
    BLOCK_BYTES,
    CONTEXT_TOKENS,
    counted,
    displace,
    new_prompt,
    tokens_of,
    with_tier,
)
from tests.live.server import LiveServer, cached_tokens

DRAFTER = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
SAVING = {"save_policy": "all"}


@pytest.fixture(scope="module")
def drafting_server() -> Iterator[LiveServer]:
    extra_args = ["--speculative-config", json.dumps(DRAFTER)]
    with with_tier(config=SAVING, extra_args=extra_args) as server:
        yield server


def test_k01_tier_is_read_with_a_drafter(
    drafting_server: LiveServer, stock_server: LiveServer
) -> None:
    server = drafting_server
    # What repeats is drafted.
    prompt = (new_prompt(40) * 9)[:CONTEXT_TOKENS]
    expected = tokens_of(stock_server.complete(prompt, max_tokens=40))
    with counted(server, "saved_bytes") as risen:
        assert tokens_of(server.complete(prompt, max_tokens=40)) == expected
    assert risen["saved_bytes"] >= len(prompt) // 32 * BLOCK_BYTES
    displace(server)
    with counted(server, "external_hit_tokens") as risen:
        answer = server.complete(prompt, max_tokens=40)
    assert risen["external_hit_tokens"] == cached_tokens(answer) > 0
    assert tokens_of(answer) == expected
    drafted = server.metrics()["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted > 0


@pytest.fixture(scope="module")
def eight_bit_server() -> Iterator[LiveServer]:
    with with_tier(config=SAVING, extra_args=["--kv-cache-dtype", "fp8"]) as server:
        yield server


def test_j10_cache_of_eight_bits_comes_back(eight_bit_server: LiveServer) -> None:
    server, prompt = eight_bit_server, new_prompt()
    first = server.complete(prompt, max_tokens=8)
    displace(server)
    with counted(server, "external_hit_tokens") as risen:
        again = server.complete(prompt, max_tokens=8)
    assert risen["external_hit_tokens"] == cached_tokens(again) == CONTEXT_TOKENS
    assert tokens_of(again) == tokens_of(first)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (COMPLETIONS, {"model": "nobody"}),
        (CHAT, {"messages": [{"role": 5, "content": "x"}]}),
        (COMPLETIONS, {"n": 0}),
        (COMPLETIONS, {"prompt": list(range(100, 200)) * 100}),
        (COMPLETIONS, {"prompt": []}),
    ],
    ids=["model", "role", "n", "too_long", "empty"],
)
def test_e07_refused_request_leaves_nothing(
    tier_server: LiveServer, path: str, wrong: Mapping[str, object]
) -> None:
    hint = {
        "session_id": "refused",
        "cache_control": {"ttl": 600},
        "context_management": {"edits": [{"type": "prefetch"}]},
    }
    before = tier_server.stats()
    answer = tier_server.post(path, body_of(path) | dict(wrong) | {"agent_hint": hint})
    assert 400 <= answer.status_code < 500, answer.text
    assert session_of(tier_server, "refused") is None
    after = tier_server.stats()
    for account in ("sessions", "timers", "operations_open", "jobs_in_flight"):
        assert after[account] == before[account], account


def test_e07_wrong_ttl_leaves_nothing(tier_server: LiveServer) -> None:
    hint = {
        "session_id": "refused",
        "cache_control": {"ttl": "soon"},
        "context_management": {"edits": [{"type": "prefetch"}]},
    }
    answer = tier_server.post(COMPLETIONS, body_of(COMPLETIONS) | {"agent_hint": hint})
    assert answer.status_code == 400
    assert session_of(tier_server, "refused") is None
