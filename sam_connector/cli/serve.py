"""``sam serve MODEL``: vLLM's own server with our two flags filled in.

The server is started as a module and not through the ``vllm`` script, which the CPU
build of vLLM does not carry in working order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from sam_connector.cli.errors import CommandError
from sam_connector.config import SamConfig
from sam_connector.errors import ConfigurationError
from sam_connector.storage.registry import StoreOptions, open_store, scheme_of

if TYPE_CHECKING:
    from sam_connector.cli.parsers import Commands

CONNECTOR = "SAMConnector"
MIDDLEWARE = "sam_connector.AgentHintMiddleware"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

_FILLED_IN = {
    "--kv-transfer-config": "use --sam-config before MODEL for the settings",
    "--sam-config": "it belongs before MODEL",
    "--model": "MODEL is the first argument",
}


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="start vLLM with session hints",
        usage="sam serve [--sam-config JSON] MODEL [vLLM arguments ...]",
        description="Starts vLLM's OpenAI server with the connector and its "
        "middleware. Everything after MODEL goes to vLLM unchanged.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sam-config",
        dest="config",
        metavar="JSON",
        default="{}",
        help="settings of the connector (kv_connector_extra_config)",
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("vllm_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> NoReturn:
    if find_spec("vllm") is None:
        raise CommandError("vLLM is not installed beside sam-connector")
    arguments = server_arguments(
        options.model, options.vllm_args, parse_config(options.config)
    )
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", SERVER_MODULE, *arguments])


def parse_config(text: str) -> Mapping[str, object]:
    """The connector's settings, checked here so that nobody waits for the server.

    Raises:
        CommandError: they are wrong; names every problem.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CommandError(f"--sam-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CommandError("--sam-config must be a JSON object")
    try:
        parsed = SamConfig.from_extra_config(config)
        _check_store(parsed.store.store)
    except ConfigurationError as error:
        raise CommandError("; ".join(error.problems)) from None
    return config


def _check_store(url: str) -> None:
    """Opens the store, which connects to nothing; an embedded one would be started."""
    if url and scheme_of(url) != "embedded":
        open_store(url, StoreOptions()).blocks.close()


def server_arguments(
    model: str, vllm_args: Sequence[str], config: Mapping[str, object]
) -> list[str]:
    """The whole command line of the server.

    Raises:
        CommandError: ``vllm_args`` sets what this command fills in.
    """
    refuse_conflicts(vllm_args)
    transfer: dict[str, object] = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if config:
        transfer["kv_connector_extra_config"] = dict(config)
    return [
        *("--model", model),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--middleware", MIDDLEWARE),
        *vllm_args,
    ]


def refuse_conflicts(vllm_args: Sequence[str]) -> None:
    """Refuse flags that would undo, or double, those filled in here."""
    for argument in vllm_args:
        # vLLM takes underscores for dashes and ``--flag.key value`` for JSON flags.
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _FILLED_IN:
            raise CommandError(f"{argument}: sam serve sets {name}; {_FILLED_IN[name]}")
        if argument.partition("=")[2] == MIDDLEWARE or argument == MIDDLEWARE:
            raise CommandError(f"sam serve adds {MIDDLEWARE} itself")
