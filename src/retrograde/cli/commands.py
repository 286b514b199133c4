"""The interface by which the commands of the command line add themselves."""

import argparse
from typing import Protocol


class Commands(Protocol):
    """What `ArgumentParser.add_subparsers` returns. A command sets `run`, which returns an exit code."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser: ...
