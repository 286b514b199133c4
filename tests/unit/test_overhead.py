"""What the overhead benchmark does to parameters, without ranks, and what it makes of the times."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.overhead import Costs, grids, tables
from benchmarks.overhead_rank import WHOLE_STEP, Case, Model, Training
from benchmarks.stats import Spread

STEP = Case("step", 10)
WHOLE = Case(WHOLE_STEP, 20)


def _costs() -> Costs:
    """In the second round the machine was half as fast."""
    seconds = {
        "plain": {STEP: [1e-4, 2e-4], WHOLE: [0.1, 0.2]},
        "ours": {STEP: [3e-4, 6e-4], WHOLE: [0.15, 0.3]},
    }
    return Costs("a setting", seconds, seconds, other_load=0.5)


@pytest.mark.parametrize("parameters", (10, 20))
def test_a_model_has_as_many_parameters_as_asked_for(parameters: int) -> None:
    params = list(Model(parameters, rows=4, width=6).parameters())
    assert [tuple(param.shape) for param in params] == [(4, 6), (4,)] * (parameters // 2)


def test_every_operation_leaves_gradients_to_the_next() -> None:
    model = Model(10, rows=4, width=6)
    training = Training(model, torch.randn(3, 6))
    assert len(training.operations()) == 7
    for name, operation in training.operations().items():
        before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        taken = operation.take_turn(calls=2)
        after = [param.grad for param in model.parameters() if param.grad is not None]
        assert (len(before), len(after)) == (10, 10), name
        assert all(grad.any() for grad in after), name
        if not name.startswith("zero_grad"):
            assert all(map(torch.equal, before, after)), name
        assert (len(taken.cpu), len(taken.main_thread), len(taken.wall)) == (2, 2, 2)


def test_a_whole_step_changes_every_parameter() -> None:
    model = Model(10, rows=4, width=6)
    training = Training(model, torch.randn(3, 6))
    before = [param.detach().clone() for param in model.parameters()]
    training.step()
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(param.grad is None for param in model.parameters())


def test_a_ratio_pairs_measurements_of_the_same_round() -> None:
    assert _costs().over_plain("ours", STEP) == Spread(*[pytest.approx(3.0)] * 3)


def test_operations_are_told_per_parameter_and_steps_whole() -> None:
    operations, whole = grids(_costs())
    assert operations.rows == [("step", "10", "15.00", "45.00", "3.00 (3.00 to 3.00)")]
    assert whole.rows == [("plain", "150.0", "1.00"), ("ours", "225.0", "1.50 (1.50 to 1.50)")]


def test_results_are_written_as_tables_and_as_json() -> None:
    found = tables(_costs())
    written = found.markdown()
    assert "| operation | parameters | plain, µs | ours, µs | ours ÷ plain |" in written
    assert "- a setting; 2 interleaved rounds." in written
    assert "do not trust these figures" in written
    stored = json.loads(found.json)
    assert [(cost["engine"], cost["operation"]) for cost in stored["costs"]] == [
        ("plain", "step"),
        ("plain", WHOLE_STEP),
        ("ours", "step"),
        ("ours", WHOLE_STEP),
    ]
