"""Who waits in a window and who is reduced early: arithmetic, without ranks."""

from __future__ import annotations

import math
import random

import pytest

from retrograde.gradients.window import Windows


def play(order: list[int], sizes: dict[int, int], budget: float) -> tuple[dict[int, int], int]:
    """How often each unit was reduced (the end of the window included), and the most bytes that waited."""
    windows, held, reduced, most = Windows(), {}, dict.fromkeys(sizes, 0), 0
    with windows.window(budget):
        for unit in order:
            early = windows.admit(unit, sizes[unit], held)
            if early is None:
                reduced[unit] += 1
                continue
            for other in early:
                del held[other]
                reduced[other] += 1
            held[unit] = sizes[unit]
            most = max(most, sum(held.values()))
    for unit in held:
        reduced[unit] += 1
    return reduced, most


SIZES = dict.fromkeys(range(5), 10)


@pytest.mark.parametrize("fit", range(6))
def test_in_a_loop_those_that_fit_are_reduced_once(fit: int) -> None:
    reduced, most = play(list(range(5)) * 8, SIZES, 10 * fit + 9)
    assert sorted(reduced.values()) == [1] * fit + [8] * (5 - fit)
    assert most == 10 * fit


def test_units_that_are_not_used_any_more_make_room() -> None:
    reduced, _ = play([0, 1, 2] * 4 + [3, 4] * 6, SIZES, 30)
    assert reduced == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2}  # once before it was known that they come again


def test_a_budget_smaller_than_a_unit_passes_it_by() -> None:
    reduced, most = play([0, 1, 2] * 3, {0: 1, 1: 100, 2: 1}, 2)
    assert reduced == {0: 1, 1: 3, 2: 1} and most == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_holds_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {unit: draw.randint(1, 20) for unit in range(8)}
    order = [draw.randrange(8) for _ in range(200)]
    budget = draw.randint(0, 90)
    reduced, most = play(order, sizes, budget)
    assert most <= budget
    assert all(1 <= reduced[unit] <= order.count(unit) for unit in sizes if unit in order)
    assert play(order, sizes, 0)[0] == {unit: order.count(unit) for unit in sizes}
    assert set(play(order, sizes, math.inf)[0].values()) <= {0, 1}


def test_the_smallest_of_nested_budgets_counts() -> None:
    windows = Windows()
    with windows.window(math.inf), windows.window(15), windows.window(math.inf):
        assert windows.admit(0, 10, {}) == [] and windows.admit(1, 10, {0: 10}) is None
    assert not windows.open and windows.admit(1, 10, {0: 10}) == []
