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
    max_inflight_bytes: int = 256 << 20
    prefetch_reserve: float = 0.1
    max_load_wait_s: float = 1.0

    @property
    def is_enabled(self) -> bool:
        return self.host_bytes > 0

    def num_slots(self, slot_bytes: int, num_ranks: int) -> int:
        """Slots that each rank's share of the memory has room for."""
        return self.host_bytes // num_ranks // slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SamConfig:
    """Settings of one engine.

    Attributes:
        sam: whether hints have an effect.
        ranges: whether hints may name block ranges.
        host: the host memory tier.
        limits: bounds on what clients can make the engine keep or do.
    """

    sam: SamMode = SamMode.ON
    ranges: bool = False
    host: HostTierConfig = field(default_factory=HostTierConfig)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads ``kv_connector_extra_config``.

        Keys are those of this class, of ``HostTierConfig`` and of ``Limits``, side
        by side. Sizes are numbers of bytes or text such as ``"8GiB"``.

        Raises:
            ConfigurationError: with one line per unknown key or bad value.
        """
        reader = _Reader(extra_config)
        sam = reader.choice("sam", SamMode, SamMode.ON)
        ranges = extra_config.get("ranges", False)
        if not isinstance(ranges, bool):
            reader.problems.append(f"ranges must be true or false; got {ranges!r}")
        host = reader.section(HostTierConfig)
        limits = reader.section(Limits)
        reader.report(known={"sam", "ranges"})
        return cls(sam=sam, ranges=ranges, host=host, limits=limits)


#: Least and, if there is one, greatest value of a number; others start at 1 if they
#: are whole numbers and at 0 if not.
_BOUNDS: dict[str, tuple[float, float]] = {
    "host_bytes": (0, math.inf),
    "max_protected_fraction": (0, 1),
    "prefetch_reserve": (0, 1),
    "max_ttl_s": (0, 3600),
    "max_load_wait_s": (0, 60),
    "copy_threads": (1, 64),
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
            if spec.type == "SavePolicy":
                values[spec.name] = self.choice(
                    spec.name, SavePolicy, SavePolicy.HINTED
                )
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
