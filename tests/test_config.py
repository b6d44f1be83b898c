"""Reading ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sam_connector.config import SamConfig, SamMode
from sam_connector.core.limits import Limits
from sam_connector.errors import ConfigurationError


def test_nothing_given_means_the_defaults() -> None:
    assert SamConfig.from_extra_config({}) == SamConfig()


def test_every_limit_can_be_set() -> None:
    values = {f.name: getattr(Limits(), f.name) for f in dataclasses.fields(Limits)}
    values["max_sessions"] = 7
    config = SamConfig.from_extra_config({"sam": "shadow", "ranges": True, **values})
    assert config.sam is SamMode.SHADOW
    assert config.ranges is True
    assert config.limits.max_sessions == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sam", "yes"),
        ("sam", True),
        ("ranges", 1),
        ("max_sessions", 0),
        ("max_sessions", -5),
        ("max_sessions", 2.5),
        ("max_sessions", "many"),
        ("max_sessions", True),
        ("idle_ttl_s", float("nan")),
        ("idle_ttl_s", float("inf")),
        ("max_protected_fraction", 1.01),
        ("max_ttl_s", 3601),
        ("host_bites", "8GiB"),
    ],
)
def test_a_bad_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        SamConfig.from_extra_config({key: value})
    (problem,) = raised.value.problems
    assert key in problem
    assert repr(value) in problem or key == "host_bites"


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        SamConfig.from_extra_config({"a": 1, "b": 2, "max_edits": 0})
    assert len(raised.value.problems) == 3
