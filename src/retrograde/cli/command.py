"""Runs commands. An error of the user becomes one message on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Sequence

from retrograde.cli import doctor, export, routes, schedules
from retrograde.errors import RetrogradeError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="retrograde", description="Sharded and pipelined training for PyTorch.")
    commands = parser.add_subparsers(metavar="command", required=True)
    schedules.add_to(commands)
    doctor.add_to(commands)
    routes.add_to(commands)
    export.add_to(commands)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (RetrogradeError, OSError) as error:
        print(f"retrograde: {error}", file=sys.stderr)
        return 2
    return code
