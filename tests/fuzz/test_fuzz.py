"""A fixed share of the random programs, and the fuzzer itself: it must see what is wrong, and say it briefly."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from retrograde.gradients.deliveries import Deliveries
from tests.fuzz import oracle
from tests.fuzz.check import Checker, play
from tests.fuzz.generate import recipe
from tests.fuzz.models import batch, build
from tests.fuzz.play import sgd
from tests.fuzz.recipes import ALIKE, ALONE, KINDS, NESTED, Act, Phase, Recipe, Touch
from tests.fuzz.shrink import candidates, shrink
from tests.fuzz.touches import TOUCHES
from tests.fuzz.traces import Reduced, Trace, differences, miscounted
from tests.harness import Ranks

SEEDS = range(50)


@pytest.mark.parametrize("delay", (None, 1))
@pytest.mark.parametrize("world", (2, 3, 4))
def test_programs(ranks: Ranks, world: int, delay: int | None) -> None:
    cases = [case for case in map(recipe, SEEDS) if case.world == world]
    wrong = dict(zip((case.seed for case in cases), Checker(ranks).check_all(cases, delay), strict=True))
    assert {seed: found for seed, found in wrong.items() if found} == {}


def test_everything_is_tried() -> None:
    """What the recipes can say, the first thousand do say."""
    cases = [recipe(seed) for seed in range(1000)]
    acts = [act for case in cases for phase in case.phases for of_rank in phase.acts for act in of_rank]
    assert {kind for case in cases for kind in case.blocks} == set(KINDS)
    assert {act.kind for act in acts} == {*ALONE, *ALIKE}
    assert {act.remat for act in acts} >= set(NESTED)
    assert {case.stage for case in cases} == {1, 2, 3}
    assert {case.world for case in cases} == {2, 3, 4}
    shapes = {(case.replicas, case.world // case.replicas) for case in cases}
    assert shapes == {(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)}
    assert {phase.window for case in cases for phase in case.phases} == {None, "coalesce", "no_sync"}
    assert any(phase.budget is not None for case in cases for phase in case.phases)
    assert sum(all(phase.alike for phase in case.phases) for case in cases) > 300
    assert sum(not all(phase.alike for phase in case.phases) for case in cases) > 300
    assert all(case.possible for case in cases)
    assert {touch.kind for case in cases for phase in case.phases for touch in phase.touches} == set(TOUCHES)


def test_a_recipe_is_a_program() -> None:
    case = recipe(3)
    assert eval(repr(case), {"Recipe": Recipe, "Phase": Phase, "Act": Act, "Touch": Touch}) == case
    assert recipe(3) == case


PLAIN = Recipe(1, 2, 3, ("linear",), (Phase(((Act("backward", (0,)),),) * 2, then=("step",)),), exact=False)


def test_the_oracle_is_plain_torch() -> None:
    """At one rank it is nothing but a training loop."""
    case = replace(PLAIN, world=1, phases=tuple(replace(phase, acts=phase.acts[:1]) for phase in PLAIN.phases))
    (trace,) = oracle.play(case)
    model = build(case)
    model(batch(case, 0, 1), (0,), lambda place, block, h: block(h)).sum().backward()
    assert all(torch.equal(trace.grads[0][name], p.grad) for name, p in model.named_parameters())
    sgd(model, case).step()
    assert all(torch.equal(trace.weights[name], p) for name, p in model.named_parameters())


def test_differences_are_seen() -> None:
    got, want = oracle.play(PLAIN)[0], oracle.play(PLAIN)[0]
    assert differences(got, want) == []
    got.grads[0]["head.bias"] = None
    got.weights["inp.weight"] += 1e-7
    got.records[0][1].mul_(2)
    got.faults.append("a page")
    assert differences(got, want) == ["a page", "phase 0: gradient of head.bias", "weight inp.weight", "record 0: loss"]


def test_a_reduction_too_many_is_seen() -> None:
    """Two backwards are two reductions; in a window, and at stage 1, one."""
    acts = (Act("backward", (0,)), Act("backward", (0,)))
    case = replace(PLAIN, phases=(Phase((acts, acts)),))
    windowed = replace(case, phases=(Phase((acts, acts), window="coalesce"),))
    for each, right in ((case, 2), (windowed, 1), (replace(case, stage=1), 1)):
        want = oracle.play(each)[0]
        for times in range(4):
            got = replace(want, reductions=[{"(root)": Reduced(times, ["inp.weight", "head.bias"])}])
            assert bool(miscounted(each, got, want)) == (times != right)


def _forgetful(rank: int, world: int, case: Recipe) -> Trace:
    """An engine that loses the gradients that only other ranks have."""
    with mock.patch.object(Deliveries, "_deliver", lambda self, joined: None):
        return play(case, rank)


def test_a_fault_of_the_engine_is_found(ranks: Ranks) -> None:
    case = replace(PLAIN, exact=True, phases=(Phase(((Act("backward", (0,)),), ())),))
    got, want = ranks(2).run(_forgetful, case), oracle.play(case)
    assert "phase 0: gradient of head.weight" in differences(got[1], want[1])


def test_what_fails_is_made_small() -> None:
    def fails(case: Recipe) -> bool:
        busy = [any(act.kind == "backward" for act in acts) for acts in case.phases[0].acts]
        return any(busy) and not all(busy)

    case = next(case for case in map(recipe, range(1000)) if case.world == 4 and fails(case))
    small = shrink(case, fails)
    assert fails(small)
    assert (small.world, len(small.phases), len(small.blocks)) == (2, 1, 1)
    assert sum(len(acts) for acts in small.phases[0].acts) == 1
    assert small.phases[0].then == ()


def test_candidates_are_smaller_and_end() -> None:
    case, steps = recipe(7), 0
    while (following := next(candidates(case), None)) is not None:
        case, steps = following, steps + 1
        assert steps < 1000
    assert case.phases[0].acts == ((),) * case.world
