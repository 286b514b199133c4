"""The oracle itself: at world 1 it must be torch, at more its means must be those of a joint batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.patterns.driver import PLAIN, Player
from tests.patterns.oracle import Oracle, expected
from tests.patterns.rows import CASES
from tests.patterns.trace import Trace, differences


@pytest.mark.parametrize("case_id", [case_id for case_id, case in CASES.items() if case.precision is None])
def test_world_one_is_torch(case_id: str) -> None:
    """On one rank torch itself is the truth, whatever the row does."""
    case = CASES[case_id]
    (want,) = Oracle(case, world=1, stage=2).play()
    got = Player(case, 0, 1, PLAIN).play()
    # A window adds up locally before it adds to what was there, torch adds one by one.
    windowed = "two_windows" in case_id
    assert differences(got, want, 1e-6 if windowed else 0.0) == []


def test_means_are_those_of_the_joint_batch() -> None:
    """Four ranks with a mean loss each, or one process with the mean of the four losses."""
    case = CASES["1-plain-mlp"]
    model = Player(case, 0, 1, PLAIN).model
    batches = [case.spec.batch(rank, 0) for rank in range(4)]
    torch.stack([case.spec.loss(model(b.x), b.y) for b in batches]).mean().backward()
    for name, grad in expected(case.id, 4, 2)[0].grads[0].items():
        # The joint backward adds the ranks in another order.
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case_id", [case_id for case_id, case in CASES.items() if case.principal])
def test_larger_worlds_can_be_played(case_id: str) -> None:
    """Finite numbers, the same names and as many steps on every rank."""
    for trace in expected(case_id, 4, 1):
        assert all(list(grads) == list(trace.grads[0]) for grads in trace.grads)


def test_differences_are_seen() -> None:
    want = Trace([{"w": torch.ones(3), "b": None}], {"w": torch.ones(3)}, [("loss", torch.ones(()))], [])
    last_bit = torch.nextafter(torch.ones(3), torch.tensor(2.0))
    assert differences(want, want, 0.0) == []
    for changed in (
        replace(want, grads=[{"w": last_bit, "b": None}]),
        replace(want, grads=[{"w": torch.ones(3), "b": torch.zeros(1)}]),
        replace(want, grads=[{"w": None, "b": None}]),
        replace(want, grads=[{"w": torch.full((3,), torch.nan), "b": None}]),
        replace(want, state={"w": last_bit}),
        replace(want, state={}),
        replace(want, records=[]),
        replace(want, records=[("loss", torch.zeros(()))]),
        replace(want, leftovers=["a hook"]),
    ):
        assert len(differences(changed, want, 0.0)) == 1
    assert differences(replace(want, state={"w": last_bit}), want, 1e-6) == []
