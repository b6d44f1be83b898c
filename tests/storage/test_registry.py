"""Stores by URL: known, unknown, not installed; and nothing secret in a log."""

from __future__ import annotations

import subprocess
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


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/hunter2@host",
        "redis://:pa?hunter2@host",
        "redis://:pa#hunter2@host",
        "redis://:pa@hunter2@host",
        "redis://:[hunter2@host",
        "redis:user:hunter2@host",
        "redis://host/0?password=hunter2",
        "redis://host/0?db=1&password=a@hunter2&x=1",
        "redis+sentinel://a:1/s?sentinel_password=hunter2",
        "redis://host?auth_token=hunter2",
        "unix://user:hunter2@/run/redis.sock?db=0",
    ],
)
def test_d18_a_password_that_breaks_its_url_is_not_shown_either(url: str) -> None:
    assert "hunter2" not in redact(url)


def test_what_is_left_says_which_store_it_is() -> None:
    shown = redact("redis://user:secret@host:6379/3?db=1&password=secret")
    assert shown == "redis://user:***@host:6379/3?db=1&password=***"


def test_schemes_may_be_in_capitals() -> None:
    assert open_store("Memory://", StoreOptions()).manifests is not None


class FakeEntryPoint:
    name = "theirs"
    value = "sam_backends.memory:open_store"


def test_a_store_of_others_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def entry_points(group: str) -> list[FakeEntryPoint]:
        asked.append(group)
        return [FakeEntryPoint()]

    monkeypatch.setattr(registry.importlib.metadata, "entry_points", entry_points)
    assert open_store("theirs://", StoreOptions()).manifests is not None
    assert set(asked) == {"sam_connector.stores"}
    with pytest.raises(ValueError, match="already"):
        register("theirs", "somewhere:open_store")


@pytest.mark.parametrize("path", ["nowhere_at_all:f", "sam_backends.memory:no_such"])
def test_a_path_that_leads_nowhere_is_a_configuration_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_paths", {"lost": path})
    with pytest.raises(ConfigurationError, match="'lost' cannot be used"):
        open_store("lost://", StoreOptions())


def test_the_package_itself_loads_no_backend() -> None:
    code = "import sys, sam_connector.storage.registry, sam_connector.storage.guard\n"
    code += "print([m for m in sys.modules if m.split('.')[0] in "
    code += "('sam_backends', 'redis')])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
