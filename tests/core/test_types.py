from __future__ import annotations

import dataclasses

import pytest

from sam_connector.core.types import Edit, EditType, SessionHint, SessionKey, Zone
from tests.core.builders import EVICT, evict_range


def test_zones_are_ordered_as_they_are_allocated() -> None:
    assert sorted(Zone) == [Zone.A, Zone.B, Zone.C]


def test_two_tenants_may_use_the_same_session_id() -> None:
    assert SessionKey("a", "s") != SessionKey("b", "s")


def test_an_edit_without_a_range_is_for_the_whole_context() -> None:
    assert not EVICT.is_ranged
    assert evict_range(0, 4).is_ranged
    assert evict_range(0, None).is_ranged
    assert evict_range(None, 4).is_ranged


def test_records_are_frozen() -> None:
    edit = Edit(type=EditType.EVICT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        edit.block_start = 3  # type: ignore[misc]
    assert SessionHint(session=SessionKey("t", "s")).edits == ()
