"""Random programs under random schedules, on the classes that the transport drives.

`python -m tests.order --count 100000` runs more of them."""

from __future__ import annotations

import pytest

from retrograde.transport.order import OrderPolicy
from tests.order.failures import how_caught, run_failing
from tests.order.mutants import MUTANTS, Mutant
from tests.order.programs import features, tiny
from tests.order.schedules import broken_bounds, explore, run_random
from tests.order.world import Hang, Setting, World


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + 250):
        run_random(seed)


@pytest.mark.parametrize("first", range(0, 400, 200))
def test_failures_end_every_wait_with_their_cause(first: int) -> None:
    for seed in range(first, first + 200):
        run_failing(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_rule_left_out_is_caught(mutant: Mutant) -> None:
    assert how_caught(mutant)


def test_the_transport_must_watch_every_call_of_a_device() -> None:
    with pytest.raises(Hang):
        for seed in range(1500):
            run_random(seed, watches_all=False)


@pytest.mark.parametrize("fan_out", (2, 32))
@pytest.mark.parametrize("name", features())
def test_messages_of_a_step(name: str, fan_out: int) -> None:
    assert broken_bounds(name, fan_out) == []


# Those of TINY whose states are few; `python -m tests.order --all` explores the others.
@pytest.mark.parametrize("runs_ahead", (False, True))
@pytest.mark.parametrize(
    ("text", "soften_after", "least"),
    (
        ("r0 s b r0 s / r0 s r0 b s", 64, 600),
        ("g0 s g0 g0 b s / g0 s b g0 s", 64, 200),
        ("g0 r0 m s / g0 r0 s", 64, 200),
        ("g0 g0 g1 / g0 g1 g0", 64, 100),
        ("g1 g0 g0 s / g0 s", 1, 600),
        ("g1 g0 g0 g0 s / g0 m s", 1, 1_000),
    ),
)
def test_all_schedules(text: str, soften_after: int, least: int, runs_ahead: bool) -> None:
    setting = Setting(OrderPolicy(soften_after=soften_after), runs_ahead=runs_ahead)
    found = explore(World(tiny(text), setting), 50_000)
    assert found.all
    assert found.states >= least
