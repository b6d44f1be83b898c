"""The connector's configuration: ``kv_connector_extra_config``, checked at start.

Every problem is reported at once. Defaults suit most servers; the README has the
table of keys.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sam_connector.core.limits import Limits
from sam_connector.errors import ConfigurationError


class SamMode(enum.StrEnum):
    """What the session-aware manager does."""

    #: Nothing: stock behaviour, hints are answered ``unsupported``.
    OFF = "off"
    #: Accounts for everything, decides nothing.
    SHADOW = "shadow"
    ON = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamConfig:
    """Settings of one engine.

    Attributes:
        sam: whether hints have an effect.
        ranges: whether hints may name block ranges.
        limits: bounds on what clients can make the engine keep or do.
    """

    sam: SamMode = SamMode.ON
    ranges: bool = False
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads ``kv_connector_extra_config``.

        Keys are those of this class and of ``Limits``, side by side.

        Raises:
            ConfigurationError: with one line per unknown key or bad value.
        """
        problems: list[str] = []
        limit_fields = {f.name: f for f in dataclasses.fields(Limits)}
        known = {"sam", "ranges", *limit_fields}
        problems += [
            f"unknown key {key!r}; known keys are {', '.join(sorted(known))}"
            for key in extra_config
            if key not in known
        ]
        mode = extra_config.get("sam", SamMode.ON)
        if mode not in list(SamMode):
            problems.append(f"sam must be one of off, shadow, on; got {mode!r}")
            mode = SamMode.ON
        ranges = extra_config.get("ranges", False)
        if not isinstance(ranges, bool):
            problems.append(f"ranges must be true or false; got {ranges!r}")
            ranges = False
        limits: dict[str, Any] = {}
        for name, limit in limit_fields.items():
            if name in extra_config:
                value = extra_config[name]
                problem = _problem_with(name, value, integral=limit.type == "int")
                if problem is None:
                    limits[name] = value
                else:
                    problems.append(problem)
        if problems:
            raise ConfigurationError(problems)
        return cls(sam=SamMode(mode), ranges=ranges, limits=Limits(**limits))


def _problem_with(name: str, value: object, *, integral: bool) -> str | None:
    """What is wrong with the value of a limit, if anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} must be a number; got {value!r}"
    if integral and not isinstance(value, int):
        return f"{name} must be a whole number; got {value!r}"
    if not math.isfinite(value) or value < (1 if integral else 0):
        return f"{name} must be at least {1 if integral else 0}; got {value!r}"
    if name == "max_protected_fraction" and value > 1:
        return f"{name} must be between 0 and 1; got {value!r}"
    if name == "max_ttl_s" and value > 3600:
        return f"{name} must be at most 3600; got {value!r}"
    return None
