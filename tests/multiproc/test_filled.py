"""Plain tensors, arrays and numbers that are made of sharded tensors: they have the whole."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, weight
from tests.stages import EACH_STAGE


# ---- buffers of the user's own
def filled_by_methods(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    buffers = [torch.zeros(param.shape) for param in model.parameters()]
    for buffer, param in zip(buffers, model.parameters(), strict=True):
        buffer.mul_(0.9).add_(param.grad)
    return torch.stack([buffer.norm() for buffer in buffers])


def filled_by_copies(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    found = []
    for param in model.parameters():
        first, second, third = (param.grad.new_zeros(param.shape) for _ in range(3))
        first.copy_(param.grad)
        second[:] = param.grad
        torch.add(param.grad, param.grad, out=third)
        found += [first.sum(), second.abs().max(), third.norm()]
    return torch.stack(found)


def filled_by_foreach(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    params = list(model.parameters())
    buffers = [torch.zeros(param.shape) for param in params]
    torch._foreach_add_(buffers, [param.grad for param in params])
    torch._foreach_lerp_(buffers, [param.grad * 2 for param in params], 0.25)
    return torch.stack([*torch._foreach_norm(buffers), buffers[2].sum()])


def filled_from_parameters(model: nn.Module, loss: Loss) -> Tensor:
    """The matrices, of which both ranks have a part."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    with torch.no_grad():
        averages = [torch.zeros(param.shape) for param in matrices[:2]]
        for average, param in zip(averages, matrices, strict=False):
            average.lerp_(param, 0.5)
    return torch.stack([average.norm() for average in averages])


def momentum_by_hand(model: nn.Module, loss: Loss) -> None:
    """An optimizer as people write it, which scales by norms (LARS)."""
    buffers = {name: torch.zeros(param.size()) for name, param in model.named_parameters()}
    for step in range(3):
        model.zero_grad()
        loss(step).backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                buffers[name].mul_(0.5).add_(param.grad)
                param.sub_(buffers[name] * (0.1 * param.norm() / (buffers[name].norm() + 1e-3)))


def one_bucket(model: nn.Module, loss: Loss) -> Tensor:
    """All gradients in one vector, by slices of it, as in gradient compression."""
    loss().backward()
    params = list(model.parameters())
    flat = torch.zeros(sum(param.grad.numel() for param in params))
    views = flat.split([param.grad.numel() for param in params])
    place = 0
    for index, param in enumerate(params):
        size = param.grad.numel()
        if index % 2:
            flat[place : place + size] = param.grad.view(-1)
        else:
            views[index].copy_(param.grad.view(-1))
        place += size
    return torch.stack([flat.norm(), flat.abs().max(), flat.sum()])


def rows_of_a_matrix(model: nn.Module, loss: Loss) -> Tensor:
    """A history of gradients."""
    loss().backward()
    grad = weight(model).grad
    history = torch.zeros(4, grad.numel())
    history[1] = grad.view(-1)
    history[2].copy_(grad.flatten())
    return history


# ---- arrays and numbers
def arrays(model: nn.Module, loss: Loss) -> list[Any]:
    loss().backward()
    grad = weight(model).grad
    found = [grad.numpy(), numpy.asarray(grad), grad.cpu().numpy(), weight(model).detach().numpy()]
    found += [weight(model).data.cpu().numpy(), model[1][0].weight.detach().numpy(), grad.flatten().numpy()]
    listed = torch.tensor(grad.tolist())
    return [[array.shape for array in found], round(float(sum(abs(array).sum() for array in found)), 4), listed.shape]


def numbers(model: nn.Module, loss: Loss) -> list[Any]:
    model[0][0].weight.data.fill_(3.0)
    param = dict(model.named_parameters())["0.0.weight"]
    inside = [3.0 in param.detach(), 4.0 in param.detach()]
    return [*inside, len(param.detach().tolist())]


IDIOMS = [
    filled_by_methods,
    filled_by_copies,
    filled_by_foreach,
    filled_from_parameters,
    momentum_by_hand,
    one_bucket,
    rows_of_a_matrix,
    arrays,
    numbers,
]


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


class Scalar(nn.Module):
    """Its one element is on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.used = nn.Parameter(torch.tensor([0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.used


def scalars(model: nn.Module, loss: Loss) -> list[Any]:
    loss().backward()
    scale, used = model.parameters()
    whole = [float(scale), int(scale.detach()), bool(used.detach()), scale.item(), [1, 2, 3][scale.detach().int()]]
    return [*whole, float(scale.grad) == scale.grad.item()]


@EACH_STAGE
def test_scalars(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(both, stage, scalars, Scalar) == ["", ""]


# ---- refused
def _written_arrays(rank: int, world: int, stage: int) -> None:
    """In torch such a write changes the weight. Here it would be lost, so numpy refuses it."""
    model = net()
    rg.shard(model, stage)
    model(batch(rank)).sum().backward()
    param = weight(model)
    for array in (param.detach().numpy(), param.data.numpy(), model[1][0].weight.detach().numpy(), param.grad.numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    for tensor in (param, model[1][0].weight):
        with pytest.raises(RuntimeError, match=r"requires grad.*detach"):
            tensor.numpy()
    assert model[1][0].weight.numpy(force=True).shape == (8, 8)
    dist.barrier()


@EACH_STAGE
def test_arrays_are_not_written_to(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_written_arrays, stage)
