"""Settings of the wrapper, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from sam_connector.connector.spm.config import SpmConfig
from sam_connector.errors import ConfigurationError

INNER = {"kv_connector": "ExampleConnector"}


def test_what_is_not_ours_is_left_for_the_session_manager() -> None:
    config, rest = SpmConfig.split(
        {"inner": INNER, "keep_alive_s": 5, "max_sessions": 7, "sam": "shadow"}
    )
    assert config.inner_name == "ExampleConnector"
    assert config.keep_alive_s == 5
    assert config.traits.synthetic_load
    assert rest == {"max_sessions": 7, "sam": "shadow"}


def test_traits_can_be_overridden() -> None:
    config, _ = SpmConfig.split({"inner": INNER, "traits": {"synthetic_load": False}})
    assert not config.traits.synthetic_load


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "inner must name a connector"),
        ({"inner": "ExampleConnector"}, "inner must name a connector"),
        ({"inner": {"kv_connector": 5}}, "inner must name a connector"),
        ({"inner": INNER | {"connector": 1}}, "unknown key 'connector' in inner"),
        ({"inner": {"kv_connector": "SAMConnector"}}, "it needs no wrapper"),
        ({"inner": {"kv_connector": "SPMConnector"}}, "it needs no wrapper"),
        (
            {"inner": INNER | {"kv_connector_extra_config": 1}},
            "kv_connector_extra_config of inner must be a map",
        ),
        ({"inner": INNER, "traits": 1}, "traits must be a map"),
        ({"inner": INNER, "traits": {"x": 1}}, "unknown trait 'x'"),
        ({"inner": INNER, "keep_alive_s": 0}, "keep_alive_s must be more than 0"),
        ({"inner": INNER, "keep_alive_s": "5"}, "keep_alive_s must be a number"),
        ({"inner": INNER, "max_operations": 1.5}, "must be a whole number"),
        ({"inner": INNER, "max_operations": True}, "must be a number"),
        ({"inner": INNER, "host_bytes": "1GiB"}, "host_bytes cannot be set beside"),
        ({"inner": INNER, "store": "embedded"}, "store cannot be set beside inner"),
    ],
)
def test_problems_are_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=r".") as caught:
        SpmConfig.split(settings)
    assert any(problem in line for line in caught.value.problems)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        SpmConfig.split({"inner": {}, "traits": {"x": 1}, "keep_alive_s": -1})
    assert len(caught.value.problems) == 3
