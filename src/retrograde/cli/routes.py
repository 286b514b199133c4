"""`retrograde routes` says what each torch function does to a sharded parameter or gradient, by the table itself."""

import argparse
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from retrograde.cli.commands import Commands
from retrograde.errors import UnsupportedError
from retrograde.parameters.routes import ATTRIBUTES, ROWS, Route, row
from retrograde.torch_internals import overridable_functions

_IN_WORDS = {
    Route.IN_GRAPH: "whatever autograd records",
    Route.INTO_PLAIN: "any function that writes to a plain tensor",
    Route.OUT: "any function with `out=`",
    Route.LISTS: "`torch._foreach_...`",
}


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("routes", help="say what torch's functions do to sharded tensors")
    parser.add_argument("functions", nargs="*", help="names of functions or methods; all, if none is given")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/design/leaves.md")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    known = names()
    if arguments.markdown:
        print(as_markdown(known))
        return 0
    asked = {name: known[_known(name, known)] for name in arguments.functions} or known
    table = Table(box=None, pad_edge=False)
    for column in ("function", "route", "meaning"):
        table.add_column(column)
    for name, route in asked.items():
        table.add_row(name, route.name, route.value)
    Console().print(table)
    return 0


def _known(name: str, known: Mapping[str, Route]) -> str:
    if name not in known:
        raise UnsupportedError(f"routes: torch has no function or method {name!r} that tensors can answer for")
    return name


def names() -> dict[str, Route]:
    """Every function, method and attribute that torch asks a tensor's class about, with its route."""
    found = {name: row(name) for name in overridable_functions()}
    return dict(sorted({**found, **ROWS, **ATTRIBUTES}.items()))


def as_markdown(known: Mapping[str, Route]) -> str:
    rows = ["| route | meaning | functions |", "|---|---|---|"]
    for route in Route:
        own = " ".join(f"`{name}`" for name, found in known.items() if found is route)
        rows.append(f"| `{route.name}` | {route.value} | {_IN_WORDS.get(route, own)} |")
    return "\n".join(rows)
