"""The command line: `retrograde <command>`, also `python -m retrograde`."""

from retrograde.cli.command import main

__all__ = ["main"]
