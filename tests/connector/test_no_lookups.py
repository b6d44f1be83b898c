"""Sessions cost nothing in prefix matching, and nothing per decoded token."""

from __future__ import annotations

import pytest

from sam_connector.core.session_index import SessionIndex
from tests.connector.driving import STREAMS, Driver, hint

pytestmark = pytest.mark.vllm


class Counter:
    """Counts the calls of a method it stands in for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.num_calls = 0
        original = getattr(owner, name)

        def counted(*args: object, **kwargs: object) -> object:
            self.num_calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)


def test_no_session_lookup_per_decode_token(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = Counter(monkeypatch, SessionIndex, "get")
    totals = []
    for max_tokens in (2, 200):
        driver = Driver(num_blocks=64)
        before = lookups.num_calls
        driver.add(
            "r", STREAMS[0][:160], max_tokens=max_tokens, agent_hint=hint("s", ttl=60)
        )
        driver.engine.run_until_idle()
        totals.append(lookups.num_calls - before)
    assert totals[0] == totals[1]
    assert totals[0] > 0


def test_no_session_lookup_in_prefix_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(num_blocks=64)
    driver.run("warm", STREAMS[0][:160], agent_hint=hint("s", ttl=60))
    lookups = Counter(monkeypatch, SessionIndex, "get")
    request = driver.add("unhinted", STREAMS[0][:160])
    manager = driver.scheduler.kv_cache_manager
    manager.get_computed_blocks(request)
    assert driver.scheduler.connector.get_num_new_matched_tokens(request, 0) == (
        0,
        False,
    )
    driver.engine.run_until_idle()
    assert lookups.num_calls == 0


def test_l10_one_timer_per_context_however_long_it_decodes() -> None:
    driver = Driver(num_blocks=64)
    driver.run("r", STREAMS[0][:160], max_tokens=500, agent_hint=hint("s", ttl=60))
    stats = driver.manager.stats()
    assert stats.timers == stats.contexts == 1
    driver.check_no_leak()
