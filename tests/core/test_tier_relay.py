"""Who hears of what; that tiers hear of each change is in ``test_manager_tiers``."""

from __future__ import annotations

import pytest

from sam_connector.core.tiers import TierEvent, TierEventType
from sam_connector.core.types import EditType
from tests.core.builders import EVICT, Engine, FakeTier, key


def test_all_tiers_hear_of_the_same_changes() -> None:
    tiers = [FakeTier(), FakeTier()]
    engine = Engine(tiers=list(tiers))
    engine.turn("s", "abc", ttl=60)
    engine.edit("s", EVICT)
    first, second = tiers
    assert first.leases == second.leases
    assert first.released == second.released
    assert first.calls == second.calls == [("register_cache", key("s"), ["abc"])]


def test_a_tier_that_appears_later_is_asked_as_well() -> None:
    engine = Engine()
    engine.turn("s", "abc")
    tier = FakeTier()
    engine.tiers.append(tier)
    engine.turn("s", "abc", generated="d")
    assert tier.calls == [("register_cache", key("s"), ["abcd"])]


def test_a_request_whose_context_has_gone_with_it_is_not_told_of() -> None:
    tier = FakeTier(EditType.EVICT)
    engine = Engine(tiers=[tier])
    engine.turn("s", "abc", edits=[EVICT])
    assert [call[0] for call in tier.calls] == ["evict"]


@pytest.mark.parametrize(
    "kind", [kind for kind in TierEventType if kind is not TierEventType.OPERATION]
)
def test_what_tiers_report_is_counted(kind: TierEventType) -> None:
    """Blocks and bytes; how often, where there are no blocks."""
    tiers = [FakeTier(), FakeTier()]
    engine = Engine(tiers=list(tiers))
    for tier, num_blocks in zip(tiers, (3, 4), strict=True):
        tier.events.append(
            TierEvent(type=kind, num_blocks=num_blocks, num_bytes=10 * num_blocks)
        )
    engine.step()
    stats = engine.manager.stats()
    assert (
        stats.saved_bytes,
        stats.loaded_bytes,
        stats.tier_misses,
        stats.tier_pressure,
    ) == {
        TierEventType.SAVE: (70, 0, 0, 0),
        TierEventType.LOAD: (0, 70, 0, 0),
        TierEventType.MISS: (0, 0, 7, 0),
        TierEventType.PRESSURE: (0, 0, 0, 2),
    }[kind]


@pytest.mark.parametrize("polled", [[], [False], [True], [False, True], [True, False]])
def test_a_tier_that_wants_to_be_asked_in_every_step_is(polled: list[bool]) -> None:
    tiers = [FakeTier(EditType.OFFLOAD) for _ in polled]
    for tier, is_polled in zip(tiers, polled, strict=True):
        tier.is_polled = is_polled
    engine = Engine(tiers=list(tiers))
    engine.turn("s", "abc")
    assert engine.manager.advance(engine.now) is any(polled)
