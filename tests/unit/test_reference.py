"""The rules of tests/reference.py, one by one, in numbers whose sums show the order in which they were added."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.reference import Contribution, PlainRanks, Zero, in_one_window, joint_loss, mean, play, replay, same

BIG, SMALL = 2.0**24, 1.0  # in fp32, BIG + SMALL is BIG


def _number(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor([value])


def _mean(values: list[float | None], divisor: int) -> float | None:
    found = mean([_number(value) for value in values], divisor)
    return None if found is None else found.item()


def test_rule_1_ranks_are_added_in_their_order_and_divided_once() -> None:
    assert _mean([BIG, SMALL, -BIG], 1) == 0.0
    assert _mean([BIG, -BIG, SMALL], 1) == SMALL
    assert _mean([1.0, 2.0, 3.0], 3) == 2.0
    tenth = torch.tensor([0.1])
    assert not torch.equal(mean([tenth] * 3, 3), tenth / 3 + tenth / 3 + tenth / 3)  # divided at the end


def test_rule_2_absent_ranks_are_left_out_of_the_sum_only() -> None:
    assert _mean([4.0, None], 2) == 2.0
    assert _mean([None, None], 2) is None
    param = nn.Parameter(torch.zeros(1))
    replay(param, [[], []], 2)
    assert param.grad is None
    param.grad = torch.ones(1)
    replay(param, [[], []], 2)
    assert param.grad.item() == 1.0


def _replayed(ranks: list[list[float | None]], stage: int, **options: Callable[[nn.Parameter], None]) -> float | None:
    """Timelines from numbers: None is a zero_grad, the group is the position since the last one."""
    timelines = []
    for numbers in ranks:
        timeline, group = [], 0
        for number in numbers:
            timeline.append(Zero(True) if number is None else Contribution(group, torch.tensor([number])))
            group = 0 if number is None else group + 1
        timelines.append(timeline)
    param = nn.Parameter(torch.zeros(1))
    replay(param, timelines, stage, **options)
    return None if param.grad is None else param.grad.item()


def test_rules_3_and_4_where_sums_are_made() -> None:
    # Stage 2: (BIG + 1) loses the 1, and then -BIG + 1 does not. Stage 1 adds each rank's own first.
    assert _replayed([[BIG, -BIG], [SMALL, SMALL]], stage=2) == 0.5
    assert _replayed([[BIG, -BIG], [SMALL, SMALL]], stage=1) == 1.0


def test_rule_3_the_first_backwards_of_all_ranks_are_one_group() -> None:
    assert _replayed([[BIG, -BIG], [SMALL]], stage=2) == 0.0  # (BIG + 1) / 2, and then -BIG / 2
    assert _replayed([[SMALL], [BIG, -BIG]], stage=2) == 0.0
    assert _replayed([[SMALL], [BIG, -BIG]], stage=1) == 0.5


def test_rule_5_hooks_are_called_after_every_backward() -> None:
    def double(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.mul_(2)

    for stage in (1, 2):
        assert _replayed([[1.0, 1.0], [1.0, 1.0]], stage, hook=double) == 6.0  # (1 * 2 + 1) * 2


def test_rule_6_zeroing_forgets() -> None:
    assert _replayed([[8.0, None], [8.0, None]], stage=2) is None
    assert _replayed([[8.0, None, 2.0], [8.0, None]], stage=1) == 1.0
    with pytest.raises(AssertionError, match="alike"):
        _replayed([[8.0, None], [8.0]], stage=2)


# ---- playing
def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2))


def _backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    model[:3](x).pow(2).sum().backward()  # the last layer is used by nobody


def _program(model: nn.Module, rank: int) -> None:
    for step in range(1 + rank):
        _backward(model, rank, step)


def _grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _equal(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def test_a_world_of_one_is_torch() -> None:
    wanted = _model()
    for step in range(3):
        _backward(wanted, 0, step)
    for stage in (1, 2, 3):
        found = _model()
        play(found, 1, lambda model, rank: [_backward(model, rank, step) for step in range(3)], stage)
        assert _equal(_grads(found), _grads(wanted))
    assert wanted[3].weight.grad is None


def test_one_model_for_all_ranks_is_as_good_as_one_for_each() -> None:
    for stage in (1, 2, 3):
        one = _model()
        ranks = PlainRanks([_model() for _ in range(3)], stage)
        for _ in range(2):  # the second adds to the first
            play(one, 3, _program, stage)
            ranks.begin()
            for rank, model in enumerate(ranks.models):
                _program(model, rank)
            ranks.reduce()
            ranks.follow()
        assert _equal(_grads(one), _grads(ranks.trained))


def test_a_window_is_stage_1() -> None:
    local, each = _model(), _model()
    play(local, 4, _program, 1)
    play(each, 4, _program, 2)
    assert _equal(in_one_window(_model, 4, _program), _grads(local))
    assert not _equal(_grads(each), _grads(local)), "the sums must differ, else nothing is told apart"


def test_the_copies_follow_in_weights_and_in_what_is_trained() -> None:
    ranks = PlainRanks([_model() for _ in range(2)], 2)
    with torch.no_grad():
        ranks.trained[0].weight.mul_(2)
        ranks.trained[2].weight.mul_(2)
    ranks.trained[0].weight.requires_grad_(False)
    ranks.follow("0.")
    other = ranks.models[1]
    assert torch.equal(other[0].weight, ranks.trained[0].weight) and not other[0].weight.requires_grad
    assert torch.equal(other[2].weight, _model()[2].weight)


def test_playing_leaves_no_hooks() -> None:
    model = _model()
    kept = model(torch.ones(1, 5)).sum()  # keeps the nodes alive
    play(model, 2, _program, 2)
    before = copy.deepcopy(_grads(model))
    model.zero_grad()
    play(model, 2, _program, 2)
    kept.backward()
    model.zero_grad()
    play(model, 2, _program, 2)
    assert _equal(_grads(model), before)


def test_a_joint_loss_has_the_mean_of_the_gradients() -> None:
    model, played = _model(), _model()
    play(played, 4, lambda each, rank: _backward(each, rank, 0), 2)
    losses = [model[:3](torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))) for rank in range(4)]
    joint_loss([loss.pow(2).sum() for loss in losses]).backward()
    for param, wanted in zip(model[:3].parameters(), played[:3].parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad, rtol=1e-5, atol=1e-7)  # another order of the same sum
