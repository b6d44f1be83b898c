"""Entry point of ``sam``: arguments in, exit status out.

Exit status: 0 done, 1 it failed or a check found a problem, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sam_connector import __version__
from sam_connector.cli import control, doctor, serve
from sam_connector.cli.errors import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        return int(options.run(options))
    except CommandError as error:
        print(f"sam: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone; keep the flush at exit from failing too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sam",
        description="Start, check and look into a vLLM server with session hints.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_command(commands)
    doctor.add_command(commands)
    control.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
