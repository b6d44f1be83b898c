"""``sam doctor``: would a server started here honour session hints?"""

from __future__ import annotations

import argparse
import enum
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sam_connector.cli.parsers import Commands

PLUGIN = "sam"
PLUGIN_GROUP = "vllm.general_plugins"
MIN_PYTHON = (3, 11)


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found; ``detail`` says what to do if it is not ok."""

    check: str
    level: Level
    detail: str


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor", help="check that a server started here would honour session hints"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    findings = examine(os.environ)
    for finding in findings:
        print(f"{finding.level.value:8} {finding.check}: {finding.detail}")
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Every check, in the order in which one depends on another."""
    return [
        check_python(sys.version_info[:2]),
        check_engine(),
        check_entry_point(),
        check_allowed_plugins(environ),
        check_front_end(environ),
        check_connector(),
    ]


def check_python(version: tuple[int, int]) -> Finding:
    detail = ".".join(map(str, version))
    if version < MIN_PYTHON:
        return _problem("python", f"{detail} is too old; 3.11 or newer is needed")
    return _ok("python", detail)


def check_engine() -> Finding:
    from sam_connector.errors import IncompatibleEngineError
    from sam_connector.vllm_adapter import compat

    try:
        compat.check_version()
    except IncompatibleEngineError as error:
        return _problem("vllm", str(error))
    low, high = (".".join(map(str, version)) for version in compat.SUPPORTED)
    return _ok("vllm", f"a supported version ({low} up to, not including, {high})")


def check_entry_point() -> Finding:
    for entry in metadata.entry_points(group=PLUGIN_GROUP):
        if entry.name == PLUGIN:
            return _ok("plug-in", f"{PLUGIN_GROUP}: {entry.name} = {entry.value}")
    return _problem(
        "plug-in",
        f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}; install the package "
        "instead of putting its folder on PYTHONPATH",
    )


def check_allowed_plugins(environ: Mapping[str, str]) -> Finding:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None:
        return _ok("VLLM_PLUGINS", "not set, every plug-in loads")
    if PLUGIN in allowed.split(","):
        return _ok("VLLM_PLUGINS", f"{allowed!r} names {PLUGIN!r}")
    return _problem(
        "VLLM_PLUGINS", f"{allowed!r} leaves out {PLUGIN!r}: the plug-in will not load"
    )


def check_front_end(environ: Mapping[str, str]) -> Finding:
    if environ.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("", "0", "false"):
        return _ok("front end", "Python, loads the middleware")
    return Finding(
        check="front end",
        level=Level.WARNING,
        detail="VLLM_USE_RUST_FRONTEND is set: it loads no Python middleware, so "
        "agent_hint in a body and the control routes are not available; hints in "
        "kv_transfer_params still are",
    )


def check_connector() -> Finding:
    """Load the plug-in as vLLM does and ask vLLM's registry for the connector."""
    return _attempt("connector", _registered_connector)


def _registered_connector() -> str:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from sam_connector.vllm_adapter import plugin

    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR_NAME)
    return f"{plugin.CONNECTOR_NAME} is registered ({found.__module__})"


def _attempt(check: str, action: Callable[[], str]) -> Finding:
    """A check that runs foreign code: whatever it raises is the finding."""
    try:
        return _ok(check, action())
    except Exception as error:
        return _problem(check, f"{type(error).__name__}: {error}")


def _ok(check: str, detail: str) -> Finding:
    return Finding(check=check, level=Level.OK, detail=detail)


def _problem(check: str, detail: str) -> Finding:
    return Finding(check=check, level=Level.PROBLEM, detail=detail)
