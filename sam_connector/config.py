"""The connector's configuration: ``kv_connector_extra_config``, checked at start.

Every problem is reported at once. Defaults suit most servers; the README has the
table of keys.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from sam_connector.core.limits import Limits
from sam_connector.errors import ConfigurationError

_Choice = TypeVar("_Choice", bound=enum.StrEnum)
_Section = TypeVar("_Section")


class SamMode(enum.StrEnum):
    """What the session-aware manager does."""

    #: Nothing: stock behaviour, hints are answered ``unsupported``.
    OFF = "off"
    #: Accounts for everything, decides nothing.
    SHADOW = "shadow"
    ON = "on"


class SavePolicy(enum.StrEnum):
    """Which blocks are copied to host memory without being asked for."""

    #: What sessions hold, once it is about to be lost.
    HINTED = "hinted"
    #: Every full block of every request, when the request completes.
    ALL = "all"
    #: Nothing: only an ``offload`` edit copies.
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    """Settings of the host memory tier.

    Attributes:
        host_bytes: host memory of the engine, all its ranks together; 0 for no tier.
        save_policy: what is copied without being asked for.
        copy_threads: threads per rank that copy, where there is no DMA engine.
        max_inflight_bytes: most KV cache memory held for copies at any one time,
            all ranks together.
        prefetch_reserve: share of the GPU pool that a prefetch leaves free.
        max_load_wait_s: how long a request waits for blocks that are being loaded
            for another instead of loading them twice.
    """

    host_bytes: int = 0
    save_policy: SavePolicy = SavePolicy.HINTED
    copy_threads: int = 2
    max_inflight_bytes: int = 1 << 30
    prefetch_reserve: float = 0.1
    max_load_wait_s: float = 1.0

    @property
    def is_enabled(self) -> bool:
        return self.host_bytes > 0

    def num_slots(self, slot_bytes: int, num_ranks: int) -> int:
        """Slots that each rank's share of the memory has room for."""
        return self.host_bytes // num_ranks // slot_bytes


class StorePolicy(enum.StrEnum):
    """Which blocks are written to the store without being asked for."""

    #: Nothing: only an ``offload`` edit writes.
    ON_DEMAND = "on_demand"
    #: What sessions have in the host tier, as soon as it is there.
    SESSIONS = "sessions"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of the store that sessions outlive an engine in.

    Attributes:
        store: its URL, such as ``redis://host:6379/0``; ``embedded`` for a private
            one that ends with the engine; empty for none.
        store_namespace: part of every name; instances that are to share what they
            store have the same. Change it with the weights, unless the model's name
            or revision changes with them.
        store_policy: what is written without being asked for.
        store_ttl_s: how long what is written lives without being refreshed.
        store_keep_alive_s: how often what live leases cover is refreshed.
        store_lookup_timeout_s: how long a request waits to learn what is there.
        store_timeout_s: how long one batch of values, or one call, may take.
        store_load_timeout_s: how long a request waits for its blocks in all.
        store_value_bytes: blocks smaller than this are grouped into values of at
            least this size.
        store_max_value_bytes: blocks larger than this are cut into several values.
        store_threads: connections, and threads, per rank.
        store_max_inflight_bytes: most bytes on their way at any one time, all ranks
            together.
        store_max_queued_bytes: most bytes that wait to be moved.
        store_max_queued: most values that wait to be moved.
    """

    store: str = ""
    store_namespace: str = ""
    store_policy: StorePolicy = StorePolicy.ON_DEMAND
    store_ttl_s: float = 3_600.0
    store_keep_alive_s: float = 60.0
    store_lookup_timeout_s: float = 0.05
    store_timeout_s: float = 0.5
    store_load_timeout_s: float = 5.0
    store_value_bytes: int = 512 << 10
    store_max_value_bytes: int = 4 << 20
    store_threads: int = 2
    store_max_inflight_bytes: int = 256 << 20
    store_max_queued_bytes: int = 64 << 30
    store_max_queued: int = 65_536

    @property
    def is_enabled(self) -> bool:
        return bool(self.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamConfig:
    """Settings of one engine.

    Attributes:
        sam: whether hints have an effect.
        ranges: whether hints may name block ranges.
        host: the host memory tier.
        store: the store behind it.
        limits: bounds on what clients can make the engine keep or do.
    """

    sam: SamMode = SamMode.ON
    ranges: bool = False
    host: HostTierConfig = field(default_factory=HostTierConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads ``kv_connector_extra_config``.

        Keys are those of this class, of ``HostTierConfig``, of ``StoreConfig`` and of
        ``Limits``, side by side. Sizes are numbers of bytes or text such as ``"8GiB"``.

        Raises:
            ConfigurationError: with one line per unknown key or bad value.
        """
        reader = _Reader(extra_config)
        sam = reader.choice("sam", SamMode, SamMode.ON)
        ranges = extra_config.get("ranges", False)
        if not isinstance(ranges, bool):
            reader.problems.append(f"ranges must be true or false; got {ranges!r}")
        host = reader.section(HostTierConfig)
        store = reader.section(StoreConfig)
        limits = reader.section(Limits)
        if store.is_enabled and not host.is_enabled:
            reader.problems.append(
                "store needs host_bytes: blocks reach it through host memory"
            )
        reader.report(known={"sam", "ranges"})
        return cls(sam=sam, ranges=ranges, host=host, store=store, limits=limits)


#: Least and, if there is one, greatest value of a number; others start at 1 if they
#: are whole numbers and at 0 if not.
_BOUNDS: dict[str, tuple[float, float]] = {
    "host_bytes": (0, math.inf),
    "max_protected_fraction": (0, 1),
    "prefetch_reserve": (0, 1),
    "max_ttl_s": (0, 3600),
    "max_load_wait_s": (0, 60),
    "copy_threads": (1, 64),
    "store_threads": (1, 64),
    "store_ttl_s": (1, math.inf),
    "store_keep_alive_s": (0.1, math.inf),
    "store_lookup_timeout_s": (0, 10),
    "store_timeout_s": (0.001, 60),
    "store_load_timeout_s": (0.001, 600),
    "store_max_value_bytes": (1 << 16, 512 << 20),
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


class _Reader:
    """Reads values one by one and collects what is wrong with them."""

    def __init__(self, extra_config: Mapping[str, Any]) -> None:
        self._given = extra_config
        self._known: set[str] = set()
        self.problems: list[str] = []

    def choice(self, name: str, kind: type[_Choice], default: _Choice) -> _Choice:
        value = self._given.get(name, default)
        if isinstance(value, str) and value in list(kind):
            return kind(value)
        self.problems.append(f"{name} must be one of {', '.join(kind)}; got {value!r}")
        return default

    def section(self, kind: type[_Section]) -> _Section:
        """Reads the fields of a dataclass; each has a default."""
        values: dict[str, Any] = {}
        for spec in dataclasses.fields(kind):  # type: ignore[arg-type]
            self._known.add(spec.name)
            if spec.name not in self._given:
                continue
            if isinstance(spec.default, enum.StrEnum):
                kind_of_choice = type(spec.default)
                values[spec.name] = self.choice(spec.name, kind_of_choice, spec.default)
                continue
            if spec.type == "str":
                values[spec.name] = self._text(spec.name)
                continue
            number = self._number(spec.name, integral=spec.type == "int")
            if number is not None:
                values[spec.name] = number
        return kind(**values)

    def report(self, known: set[str]) -> None:
        known = known | self._known
        unknown = [
            f"unknown key {key!r}; known keys are {', '.join(sorted(known))}"
            for key in self._given
            if key not in known
        ]
        if unknown or self.problems:
            raise ConfigurationError([*unknown, *self.problems])

    def _text(self, name: str) -> str:
        value = self._given[name]
        if isinstance(value, str):
            return value
        self.problems.append(f"{name} must be text; got {value!r}")
        return ""

    def _number(self, name: str, *, integral: bool) -> float | None:
        given = value = self._given[name]
        if name.endswith("_bytes") and isinstance(value, str):
            value = _size(value)
        low, high = _BOUNDS.get(name, (1 if integral else 0, math.inf))
        if isinstance(value, bool) or not isinstance(value, int | float):
            kind = "a size such as 8GiB" if name.endswith("_bytes") else "a number"
            problem = f"must be {kind}"
        elif integral and not isinstance(value, int):
            problem = "must be a whole number"
        elif not math.isfinite(value) or value < low:
            problem = f"must be at least {low}"
        elif value > high:
            problem = f"must be at most {high}"
        else:
            return value
        self.problems.append(f"{name} {problem}; got {given!r}")
        return None


def _size(text: str) -> int | None:
    """Bytes in ``"8GiB"``, ``"500 MB"`` or ``"1024"``; ``None`` if it is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])
