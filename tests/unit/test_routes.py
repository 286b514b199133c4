"""The table of routes: its rows, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrograde.cli import main
from retrograde.parameters.handlers import HANDLERS
from retrograde.parameters.routes import Route, row

ROOT = Path(__file__).parents[2]

ROWS = {
    Route.MEMORY: ("data_ptr", "is_complex", "requires_grad_", "new_zeros", "untyped_storage"),
    Route.SHAPE: ("size", "numel", "__len__", "stride", "is_same_size"),
    Route.ELEMENTS: ("mul", "__rsub__", "absolute", "where", "isfinite", "clone", "__invert__", "lerp", "__rand__"),
    Route.LIKE: ("zeros_like", "empty_like"),
    Route.DRAWN: ("normal_", "rand_like"),
    Route.RESHAPED: ("view", "detach", "flatten"),
    Route.REDUCED: ("norm", "sum", "any", "linalg_vector_norm"),
    Route.WHOLE: ("matmul", "topk", "std", "t", "item", "cat", "svd_lowrank", "__rmatmul__", "dropout", "nobody_knows"),
    Route.EDIT: ("mul_", "__iadd__", "copy_", "clamp_", "zero_", "gt_"),
    Route.EDIT_WHOLE: ("cumsum_", "index_add_", "__setitem__", "tril_", "addmm_"),
    Route.LISTS: ("_foreach_add", "_foreach_mul_"),
    Route.REDUCED_LISTS: ("_foreach_norm",),
    Route.GRADIENTS: ("grad",),
    Route.REFUSED: ("t_", "resize_", "set_"),
}


@pytest.mark.parametrize("route", ROWS, ids=lambda route: route.name)
def test_rows(route: Route) -> None:
    assert {name: row(name) for name in ROWS[route]} == dict.fromkeys(ROWS[route], route)


def test_every_route_has_a_handler() -> None:
    assert set(HANDLERS) == set(Route)


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: `python -m retrograde routes --markdown` prints what belongs between the marks."""
    assert main(["routes", "--markdown"]) == 0
    page = (ROOT / "docs" / "design" / "leaves.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- routes:begin -->\n")
    table, _, _ = rest.partition("<!-- routes:end -->")
    assert table == capsys.readouterr().out


def test_one_function_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", "norm", "add_"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["norm", "REDUCED"] and any(line.split()[:2] == ["add_", "EDIT"] for line in lines)
    assert main(["routes", "nobody_knows"]) == 2
    assert "no function or method 'nobody_knows'" in capsys.readouterr().err
