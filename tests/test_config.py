"""Reading ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sam_connector.config import HostTierConfig, SamConfig, SamMode, SavePolicy
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
        ("host_bytes", "8 apples"),
        ("host_bytes", "-1"),
        ("host_bytes", -1),
        ("host_bytes", True),
        ("save_policy", "some"),
        ("save_policy", None),
        ("copy_threads", 0),
        ("prefetch_reserve", 1.5),
        ("max_inflight_bytes", 0),
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


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 GiB", 3 << 29),
        ("64MB", 64_000_000),
        ("64mib", 64 << 20),
        ("2k", 2_000),
        (0, 0),
    ],
)
def test_sizes_are_numbers_or_text(given: Any, num_bytes: int) -> None:
    config = SamConfig.from_extra_config({"host_bytes": given})
    assert config.host.host_bytes == num_bytes
    assert config.host.is_enabled is (num_bytes > 0)


def test_the_host_tier_can_be_set() -> None:
    config = SamConfig.from_extra_config(
        {"host_bytes": "1GiB", "save_policy": "all", "copy_threads": 3}
    )
    assert config.host == HostTierConfig(
        host_bytes=1 << 30, save_policy=SavePolicy.ALL, copy_threads=3
    )
