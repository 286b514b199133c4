"""What `make quick` runs: a part of every kind of test, in less than two minutes.

The table names files, and of some files which tests. What is not here runs with `make test`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.patterns.cells import is_quick

Choice = Callable[[pytest.Item], bool]


def _given(item: pytest.Item) -> dict[str, object]:
    """The arguments of a parametrized test."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def everything(item: pytest.Item) -> bool:
    return True


def at(**wanted: object) -> Choice:
    """Tests with these arguments; those that do not have one of them run too."""

    def chosen(item: pytest.Item) -> bool:
        given = _given(item)
        return all(given.get(name, value) == value for name, value in wanted.items())

    return chosen


def only(*names: str) -> Choice:
    return lambda item: item.name.partition("[")[0] in names


def one_model_per_row(item: pytest.Item) -> bool:
    return is_quick(**_given(item))  # type: ignore[arg-type]
