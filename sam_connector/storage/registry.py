"""Stores by the scheme of their URL.

Backends are loaded when they are first asked for, by dotted path: the package itself
depends on none of them. Others are found through the entry points
``sam_connector.stores``, named by their scheme.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sam_connector.errors import ConfigurationError
from sam_connector.storage.port import ManifestStore, StoreBackend

ENTRY_POINTS = "sam_connector.stores"

_REDIS = "sam_backends.redis_store:open_store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a backend is told besides its URL.

    Attributes:
        connect_timeout_s: for a connection to be made; deadlines of calls hold too.
        num_connections: for values, besides those for small commands.
        scope: names one engine; its processes share what an embedded store keeps.
    """

    connect_timeout_s: float = 0.25
    num_connections: int = 2
    scope: str = ""


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store, and where it keeps manifests if it can."""

    blocks: StoreBackend
    manifests: ManifestStore | None


Factory = Callable[[str, StoreOptions], OpenStore]

_SECRET_OPTION = re.compile(r"([?&][^=&]*(?:pass|secret|token)[^=&]*=)[^&]*", re.I)

_paths: dict[str, str] = {
    "embedded": "sam_backends.embedded:open_store",
    "memory": "sam_backends.memory:open_store",
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
    "redis+unix": _REDIS,
    "unix": _REDIS,
    "valkey": _REDIS,
    "valkeys": _REDIS,
}


def register(scheme: str, path: str) -> None:
    """Adds a store.

    Args:
        scheme: of its URLs.
        path: of its factory, ``package.module:name``.

    Raises:
        ValueError: the scheme is taken, or the path is none.
    """
    if scheme in _known():
        raise ValueError(f"there is a store {scheme!r} already: {_known()[scheme]}")
    if not re.fullmatch(r"[\w.]+:\w+", path):
        raise ValueError(f"not a path such as package.module:name: {path!r}")
    _paths[scheme] = path


def known_schemes() -> list[str]:
    """What URLs may begin with."""
    return sorted(_known())


def scheme_of(url: str) -> str:
    """The scheme of a store's URL; a URL without one is all scheme."""
    return url.partition(":")[0].lower()


def open_store(url: str, options: StoreOptions) -> OpenStore:
    """The store at ``url``. Connects to nothing: a store may come up later.

    Raises:
        ConfigurationError: there is no such store, its package is not installed, or
            the URL is not right.
    """
    scheme = scheme_of(url)
    path = _known().get(scheme)
    if path is None:
        known = ", ".join(known_schemes())
        raise ConfigurationError([f"store {scheme!r} is none of {known}"])
    return _load(scheme, path)(url, options)


def redact(url: str) -> str:
    """The URL without what must not be seen in a log; rather too little than too much.

    Passwords may contain anything, also what ends a host in a proper URL.
    """
    url = _SECRET_OPTION.sub(r"\1***", url)
    scheme, slashes, rest = url.rpartition("@")[0].partition("://")
    if not scheme:
        return url
    start = f"{scheme}{slashes}{rest.partition(':')[0]}:" if slashes else ""
    return f"{start}***@{url.rpartition('@')[2]}"


def _known() -> dict[str, str]:
    found = {
        e.name: e.value for e in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }
    return {**found, **_paths}


def _load(scheme: str, path: str) -> Factory:
    module_name, _, name = path.partition(":")
    try:
        factory: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            [f"store {scheme!r} cannot be used: {error} (pip install {_extra(path)})"]
        ) from error
    loaded: Factory = factory
    return loaded


def _extra(path: str) -> str:
    if not path.startswith("sam_backends."):
        return "the package it comes from"
    extra = "embedded" if path.startswith("sam_backends.embedded") else "redis"
    return f"'sam-connector[{extra}]'"
