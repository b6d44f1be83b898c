"""Settings of ``SPMConnector``: the inner connector, and bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sam_connector.connector.spm.traits import UNKNOWN, ConnectorTraits, traits_of
from sam_connector.errors import ConfigurationError

_INNER_KEYS = frozenset(
    {
        "kv_connector",
        "kv_connector_module_path",
        "kv_connector_extra_config",
        "kv_role",
        "kv_port",
        "kv_buffer_device",
    }
)

#: Settings of the session manager that need memory of our own.
_NOT_HERE = ("host_bytes", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmConfig:
    """Settings of one engine.

    Attributes:
        inner: how ``--kv-transfer-config`` would name the inner connector.
        traits: what it offers.
        keep_alive_s: how often the keys of live leases are refreshed.
        confirm_timeout_s: how long an offload waits for the inner connector to have
            saved, and a prefetch for its look-up to answer.
        failed_retry_s: how long what could not be loaded is not tried again.
        failed_load_wait_s: how long an asynchronous load that may have begun before
            the inner connector raised keeps its blocks and its request.
        max_prefetch_blocks: most blocks that one prefetch may load at a time.
        max_operations: offloads and prefetches that may wait their turn.
        max_remembered_tokens: tokens of sessions remembered, without which there is
            nothing to ask the inner connector for.
        max_contexts: sequences remembered per session.
    """

    inner: Mapping[str, Any] = field(default_factory=dict)
    traits: ConnectorTraits = UNKNOWN
    keep_alive_s: float = 60.0
    confirm_timeout_s: float = 5.0
    failed_retry_s: float = 60.0
    failed_load_wait_s: float = 30.0
    max_prefetch_blocks: int = 4_096
    max_operations: int = 256
    max_remembered_tokens: int = 16_777_216
    max_contexts: int = 4

    @property
    def inner_name(self) -> str:
        return str(self.inner.get("kv_connector", ""))

    @classmethod
    def split(cls, extra_config: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Reads ``kv_connector_extra_config``.

        Returns:
            Our settings, and what is left for ``SamConfig``.

        Raises:
            ConfigurationError: with one line per problem.
        """
        rest = dict(extra_config)
        problems = [
            f"{name} cannot be set beside inner; to have both, there is MultiConnector"
            for name in _NOT_HERE
            if rest.get(name)
        ]
        inner = rest.pop("inner", None)
        problems += _inner_problems(inner)
        overrides = rest.pop("traits", {})
        if not isinstance(overrides, Mapping):
            problems.append(f"traits must be a map of names; got {overrides!r}")
            overrides = {}
        name = inner.get("kv_connector", "") if isinstance(inner, Mapping) else ""
        traits, wrong = traits_of(str(name), overrides)
        problems += wrong
        numbers: dict[str, Any] = {}
        for spec in dataclasses.fields(cls):
            if spec.name in rest and isinstance(spec.default, int | float):
                value = rest.pop(spec.name)
                problem = _number_problem(value, integral=spec.type == "int")
                if problem is None:
                    numbers[spec.name] = value
                else:
                    problems.append(f"{spec.name} {problem}; got {value!r}")
        if problems:
            raise ConfigurationError(problems)
        return cls(inner=dict(inner), traits=traits, **numbers), rest


def _inner_problems(inner: Any) -> list[str]:
    if not isinstance(inner, Mapping) or not isinstance(inner.get("kv_connector"), str):
        return [
            'inner must name a connector, as in {"kv_connector": "ExampleConnector"}; '
            f"got {inner!r}"
        ]
    problems = [
        f"unknown key {key!r} in inner; known keys are {', '.join(sorted(_INNER_KEYS))}"
        for key in inner
        if key not in _INNER_KEYS
    ]
    if inner["kv_connector"] in ("SPMConnector", "SAMConnector"):
        problems.append(f"{inner['kv_connector']} has sessions; it needs no wrapper")
    extra = inner.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        problems.append(f"kv_connector_extra_config of inner must be a map: {extra!r}")
    return problems


def _number_problem(value: Any, *, integral: bool) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    if integral and not isinstance(value, int):
        return "must be a whole number"
    if not math.isfinite(value) or value <= 0:
        return "must be more than 0"
    return None
