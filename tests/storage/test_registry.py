"""Stores by URL: known, unknown, not installed; and nothing secret in a log."""

from __future__ import annotations

import sys

import pytest

from sam_connector.errors import ConfigurationError
from sam_connector.storage import registry
from sam_connector.storage.registry import StoreOptions, open_store, redact, register


def test_a_store_is_found_by_its_scheme() -> None:
    assert open_store("memory://", StoreOptions()).manifests is not None


def test_an_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"'etcd' is none of .*redis"):
        open_store("etcd://host", StoreOptions())


def test_a_scheme_is_given_once() -> None:
    with pytest.raises(ValueError, match="already"):
        register("redis", "somewhere:open_store")
    with pytest.raises(ValueError, match="path"):
        register("unheard-of", "nowhere")


def test_a_store_of_others_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_paths", dict(registry._paths))
    register("ours", "sam_backends.memory:open_store")
    assert "ours" in registry.known_schemes()
    open_store("ours://", StoreOptions())


def test_a_package_that_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.startswith("sam_backends.redis_store")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"sam-connector\[redis\]"):
        open_store("redis://localhost", StoreOptions())


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host:6379/3",
        "rediss://:hunter2@host",
        "redis+sentinel://u:hunter2@a:1,b:2/service",
        "redis+cluster://u:hun%74er2@a:1",
    ],
)
def test_d18_a_password_is_not_in_what_is_logged(url: str) -> None:
    shown = redact(url)
    assert "hunter2" not in shown
    assert "hun%74er2" not in shown
    assert url.partition("://")[0] in shown


def test_a_url_without_a_password_is_shown_as_it_is() -> None:
    assert redact("redis://host:6379/3") == "redis://host:6379/3"
    assert redact("embedded") == "embedded"
