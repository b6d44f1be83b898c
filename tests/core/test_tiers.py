from __future__ import annotations

import gc

import pytest

from sam_connector.core.tiers import SupportsSessionAwareKVManagement, live_tiers
from sam_connector.core.types import EditType
from tests.core.builders import FakeTier


def test_every_live_tier_is_known_and_none_is_kept_alive() -> None:
    gc.collect()
    tier = FakeTier(EditType.EVICT)
    assert tier in live_tiers()
    known = len(live_tiers())
    del tier
    gc.collect()
    assert len(live_tiers()) == known - 1


def test_a_tier_that_lacks_a_method_cannot_be_made() -> None:
    class Half(SupportsSessionAwareKVManagement):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
