"""``sam serve`` checks the store's URL before a model is loaded."""

from __future__ import annotations

import json

import pytest

from sam_connector.cli.errors import CommandError
from sam_connector.cli.serve import parse_config


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://localhost:6379/0", "none of"),
        ("redis://localhost:abc/0", "abc"),
        ("redis:localhost:6379", "redis:localhost"),
    ],
)
def test_a_wrong_url_is_refused(url: str, what: str) -> None:
    with pytest.raises(CommandError, match=what):
        parse_config(json.dumps({"host_bytes": "1GiB", "store": url}))


@pytest.mark.parametrize("url", ["redis://localhost:1/0", "embedded", "memory://x"])
def test_a_right_one_is_not_connected_to(url: str) -> None:
    assert parse_config(json.dumps({"host_bytes": "1GiB", "store": url}))
