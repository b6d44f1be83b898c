"""What is promised of which connector."""

from __future__ import annotations

import pytest

from sam_connector.connector.spm.traits import (
    UNKNOWN,
    Confirm,
    Refresh,
    known_connectors,
    traits_of,
)


def test_nothing_is_promised_of_an_unknown_connector() -> None:
    traits, problems = traits_of("SomebodysConnector", {})
    assert problems == []
    assert traits == UNKNOWN
    assert not traits.synthetic_load
    assert not traits.synthetic_save
    assert traits.refresh is Refresh.NONE


def test_known_connectors() -> None:
    assert "ExampleConnector" in known_connectors()
    traits, _ = traits_of("ExampleConnector", {})
    assert traits.synthetic_load
    assert traits.confirm is Confirm.STEP
    traits, _ = traits_of("AscendStoreConnector", {})
    assert traits.refresh is Refresh.LOOKUP
    assert not traits.synthetic_load


def test_an_operator_knows_better() -> None:
    traits, problems = traits_of(
        "SomebodysConnector", {"refresh": "lookup", "synthetic_load": True}
    )
    assert problems == []
    assert traits.refresh is Refresh.LOOKUP
    assert traits.synthetic_load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"prefetch": True}, "unknown trait 'prefetch'; known traits are confirm"),
        ({"synthetic_load": 1}, "synthetic_load must be true or false; got 1"),
        ({"refresh": "ttl"}, "refresh must be one of none, lookup; got 'ttl'"),
        ({"confirm": True}, "confirm must be one of lookup, step; got True"),
    ],
)
def test_wrong_overrides_are_named(overrides: dict[str, object], problem: str) -> None:
    traits, problems = traits_of("ExampleConnector", overrides)
    assert len(problems) == 1
    assert problem in problems[0]
    assert traits == traits_of("ExampleConnector", {})[0]
