from __future__ import annotations

import dataclasses

import pytest

from sam_connector.core.stats import Stats
from sam_connector.core.types import EditType
from tests.core.builders import EVICT, Engine, FakeTier


def test_a_picture_is_frozen_and_does_not_change_afterwards() -> None:
    engine = Engine(tiers=[FakeTier(EditType.EVICT)])
    engine.turn("s", "abc", ttl=60)
    before = engine.manager.stats()
    engine.edit("s", EVICT)
    assert before.sessions == 1
    assert before.edits == {}
    assert engine.manager.stats().edits == {"evict/completed": 1}
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.sessions = 2  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    assert Stats.__doc__ is not None
    for stats_field in dataclasses.fields(Stats):
        assert f"        {stats_field.name}: " in Stats.__doc__


def test_the_gauges_follow_what_is_known() -> None:
    engine = Engine()
    engine.turn("s", "abc", ttl=60)
    engine.turn("t", "abcd")
    running = engine.start("u", "xy")
    stats = engine.manager.stats()
    assert (stats.sessions, stats.contexts, stats.timers) == (3, 3, 3)
    assert stats.running_requests == 1
    assert stats.records == 3 + 4 + 2
    assert (stats.claimed_blocks, stats.protected_blocks) == (6, 3)
    assert (stats.hinted_requests, stats.leases_granted) == (3, 2)
    engine.finish(running)
    engine.step(61)
    assert engine.manager.stats().leases_expired == 1
