"""The shared servers themselves: what every other live test builds on."""

from __future__ import annotations

import pytest

from tests.live.server import (
    LiveServer,
    cached_tokens,
    free_all_sessions,
    leak_check,
)

PROMPT = list(range(100, 400))


def test_stock_server_has_no_control_routes(stock_server: LiveServer) -> None:
    assert stock_server.get("/health").status_code == 200
    assert stock_server.get("/v1/agent/stats").status_code == 404


def test_equal_requests_get_equal_tokens_from_both(
    live_server: LiveServer, stock_server: LiveServer
) -> None:
    hint = {"session_id": "twin", "cache_control": {"ttl": 30}}
    ours = live_server.complete(PROMPT, max_tokens=16, hint=hint)
    stock = stock_server.complete(PROMPT, max_tokens=16)
    tokens = ours["choices"][0]["token_ids"]
    assert tokens == stock["choices"][0]["token_ids"]
    assert len(set(tokens)) > 4


def test_repeated_prompts_come_from_the_cache(live_server: LiveServer) -> None:
    live_server.reset_prefix_cache()
    assert cached_tokens(live_server.complete(PROMPT)) == 0
    assert cached_tokens(live_server.complete(PROMPT)) == 288
    assert live_server.metrics()["vllm:prefix_cache_hits_total"] >= 288


def test_leak_check_frees_sessions(live_server: LiveServer) -> None:
    hint = {"session_id": "a/b c", "cache_control": {"ttl": 3600}}
    live_server.complete(PROMPT, hint=hint)
    held = live_server.stats()
    assert held["sessions"] == 1
    assert held["claimed_blocks"] >= 9
    assert held["protected_blocks"] >= 9
    leak_check(live_server)
    assert live_server.stats()["sessions"] == 0


def test_leak_check_notices_a_held_session(
    live_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_server.complete(PROMPT, hint={"session_id": "left"})
    monkeypatch.setattr("tests.live.server.free_all_sessions", lambda server: None)
    with pytest.raises(AssertionError, match=r"still held: .*'sessions': 1"):
        leak_check(live_server)
    free_all_sessions(live_server)
