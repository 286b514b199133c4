"""`copy.deepcopy` and `AveragedModel` of a sharded model: a second sharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, sgd, trained, weight
from tests.multiproc.pictures import batch as picture_batch
from tests.multiproc.pictures import pictures
from tests.stages import EACH_STAGE


def teacher(model: nn.Module, loss: Loss) -> Tensor:
    """A reference that stays as it is while the model is trained."""
    first = copy.deepcopy(model)
    assert type(first).__name__ == type(model).__name__ and list(first.state_dict()) == list(model.state_dict())
    trained(model, loss)
    apart = sum((one.detach() - two.detach()).abs().sum() for one, two in zip(*_params(model, first), strict=True))
    trained(first, lambda step=0: first(batch(0, step)).pow(2).mean())  # has gradients and a graph of its own
    return torch.stack([apart, *(param.detach().norm() for param in first.parameters())])


def _params(*models: nn.Module) -> list[list[nn.Parameter]]:
    return [list(model.parameters()) for model in models]


def _averaged(average: AveragedModel, model: nn.Module, loss: Loss, steps: int) -> AveragedModel:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        average.update_parameters(model)
    return average


def average_of_weights(model: nn.Module, loss: Loss) -> Tensor:
    average = _averaged(AveragedModel(model), model, loss, steps=4)
    return torch.cat([value.flatten() for value in average.module.state_dict().values()])


def moving_average(model: nn.Module, loss: Loss) -> Tensor:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    return _averaged(average, model, loss, steps=3)(batch(0))


def frozen_stays_frozen(model: nn.Module, loss: Loss) -> list[bool]:
    weight(model).requires_grad_(False)
    made = copy.deepcopy(model)
    model.requires_grad_(False)
    return [param.requires_grad for param in made.parameters()]


def tied(model: nn.Module, loss: Loss) -> list[int]:
    model[1][0].weight = model[0][0].get_parameter("bias")  # as odd as can be: one parameter in two modules
    made = copy.deepcopy(model)
    return [len(list(each.parameters())) for each in (model, made)]


def averages_of_parameters(model: nn.Module, loss: Loss) -> Tensor:
    """Without a model: copies of the parameters."""
    averages = [copy.deepcopy(param) for param in model.parameters()]
    assert all(isinstance(each, nn.Parameter) and each.requires_grad for each in averages)
    trained(model, loss)
    with torch.no_grad():
        for average, param in zip(averages, model.parameters(), strict=True):
            average.mul_(0.5).add_(param, alpha=0.5)
        torch._foreach_lerp_(averages, list(model.parameters()), 0.25)
    return torch.stack([average.detach().sum() for average in averages])


IDIOMS = [teacher, average_of_weights, moving_average, frozen_stays_frozen, tied, averages_of_parameters]


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


def _alike(make: Callable[[], nn.Module], x: Tensor) -> None:
    model = make()
    rg.shard(model, 3)
    made = copy.deepcopy(model)
    state, other = model.state_dict(), made.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) and state[key].stride() == other[key].stride() for key in state)
    for one, two in zip(model.parameters(), made.parameters(), strict=True):
        assert one is not two and (one.local.numel() == 0 or one.local.data_ptr() != two.local.data_ptr())
    assert torch.equal(_first(model(x)), _first(made(x)))
    dist.barrier()


def _first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _kinds(rank: int, world: int) -> None:
    _alike(pictures, picture_batch(0))
    _alike(lambda: nn.LSTM(6, 5, num_layers=2), torch.ones(3, 2, 6))
    _alike(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), torch.arange(12.0).view(2, 6))


def test_kinds_of_models(ranks: Ranks) -> None:
    """Other strides, weights that a module keeps twice, buffers."""
    ranks(2).run(_kinds)


def _memory(rank: int, world: int) -> tuple[int, int]:
    """While it is copied no rank has more than a few pages."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    engine = rg.shard(model, 3)
    copy.deepcopy(model)
    dist.barrier()
    return engine.ledger.peak, sum(param.nbytes for param in model.parameters())


def test_no_rank_holds_the_whole(ranks: Ranks) -> None:
    for most, whole in ranks(2).run(_memory):
        assert 0 < most < whole / 2
