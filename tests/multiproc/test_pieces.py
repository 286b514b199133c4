"""Pieces beside the whole: rows, masks, views and full-shaped neighbours of parameters and gradients, as in torch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, sgd, weight
from tests.stages import EACH_STAGE, OPPOSITE_STAGES


def held_over_steps(model: nn.Module, loss: Loss) -> Tensor:
    """A weight that is taken once, as people take it who know that it is the parameter."""
    kept, optimizer = model[1][0].weight, sgd(model)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        (loss(step) + kept.pow(2).sum()).backward()
        optimizer.step()
        seen.append(kept.detach().norm())
        optimizer.zero_grad()
        kept.pow(2).sum().backward()
        optimizer.step()
    with torch.no_grad():
        weight(model).mul_(0.5)
        kept.mul_(1.0)
    return torch.stack([*seen, kept.detach().norm()])


def rows_of_gradients(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    grad = weight(model).grad
    found = [grad[0].norm(), grad[:, 1].sum(), grad[grad > 0].sum(), grad.narrow(0, 0, 2).norm()]
    found.append(grad.flatten()[:5].sum())
    grad[0] = 0
    grad[[2, 3]] = grad[[2, 3]] * 2
    grad[grad > 0.01] = 0.5
    model[2].weight.grad.index_fill_(0, torch.tensor([1]), 0.25)
    model[0][0].bias.grad[:] = 0.125
    model[0][0].bias.grad[...] += 1
    return torch.stack(found)


def edits_of_views(model: nn.Module, loss: Loss) -> Tensor:
    """Rows, columns and views of views of a gradient and of a momentum, written to by name, by sign and by function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-3, momentum=0.5)
    loss().backward()
    optimizer.step()
    grad, momentum = weight(model).grad, optimizer.state[weight(model)]["momentum_buffer"]
    grad[0] *= 2
    grad[1:3].add_(1)
    grad.T[3].mul_(grad[2])
    grad[:, 1] -= 0.5
    grad.diagonal().zero_()
    grad[4][2:][1].fill_(7)
    row = grad[5]
    grad.mul_(3)  # the row is of what the gradient has become
    row.sub_(grad[6])
    grad[7, 2] += 1
    torch.neg_(grad[6])
    nn.init.ones_(grad[3, :2])
    row[1:4] = 4
    for each in grad:
        each.div_(2)
    for half in grad.chunk(2):
        half[0].sqrt_().nan_to_num_(1.0)
    grad[2].copy_(model[0][0].bias.grad)
    row = grad[5]
    momentum[1] *= 0.25
    momentum.t()[2].clamp_(min=0)
    kept = [row * 2, copy.deepcopy(row), row.clone().mul_(5), row[1:].cumsum(0).sum() + grad[0]]
    optimizer.step()
    return torch.stack(kept)


def rows_of_parameters(model: nn.Module, loss: Loss) -> Tensor:
    matrix = weight(model)
    with torch.no_grad():
        matrix[0] = 0
        matrix.data[1].fill_(2.0)
        matrix.data.view(-1)[60:] = 0.5
        matrix.data.t()[3].mul_(3.0)
        matrix.scatter_(0, torch.tensor([[5, 6]]), 7.0)
        return torch.stack([matrix[0].norm(), matrix.data[1].sum(), matrix.data.T[2].norm()])


def shapes_of_gradients(model: nn.Module, loss: Loss) -> list[int]:
    loss().backward()
    for param in model.parameters():
        if param.grad.dim() > 1:
            param.grad.add_(-param.grad.mean(dim=1, keepdim=True))
    grad = weight(model).grad
    return [grad.dim(), weight(model).data.ndim, grad.abs().ndim, grad.flatten().dim()]


def norms_in_double(model: nn.Module, loss: Loss) -> list[bool]:
    """Sums over the ranks are wider than the gradients."""
    loss().backward()
    grad = weight(model).grad
    flat = grad.flatten().double().abs()
    exact = {0: (flat > 0).double().sum(), 1: flat.sum(), 2: flat.pow(2).sum().sqrt(), 3: flat.pow(3).sum() ** (1 / 3)}
    return [float((grad.double().norm(order) - norm).abs()) < 1e-14 for order, norm in exact.items()]


def _exactly_rounded(rank: int, world: int, stage: int) -> list[str]:
    """Norms and sums of fp32, of tensors and of lists, that are further than 1 ulp from the rounded fp64 value."""
    model = nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 300))
    rg.shard(model, stage)
    faults = []
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        # Over six orders of magnitude: added up in fp32, one after the other, they are off by many ulps.
        whole = torch.randn(param.shape, generator=generator) * 10 ** torch.empty(param.shape).uniform_(
            -3, 3, generator=generator
        )
        param.grad = whole
        with torch.no_grad():
            param.copy_(whole)
        exact = whole.double().flatten()
        wanted = {
            "sum": exact.sum(),
            "mean": exact.mean(),
            "norm": exact.norm(),
            "1-norm": exact.abs().sum(),
            "3-norm": exact.abs().pow(3).sum() ** (1 / 3),
            "foreach": exact.norm(),
        }
        for kind, tensor in {"p": param.detach(), "p.grad": param.grad, "p.grad / 2": param.grad / 2}.items():
            factor = 0.5 if kind == "p.grad / 2" else 1.0
            found = {
                "sum": tensor.sum(),
                "mean": tensor.mean(),
                "norm": tensor.norm(),
                "1-norm": torch.linalg.vector_norm(tensor, 1),
                "3-norm": tensor.norm(3),
                "foreach": torch._foreach_norm([tensor])[0],
            }
            for name, number_of in found.items():
                rounded = (wanted[name] * factor).float()
                ulp = torch.nextafter(rounded.abs(), torch.tensor(torch.inf)) - rounded.abs()
                if number_of.dtype is not torch.float32 or (number_of - rounded).abs() > ulp:
                    faults.append(f"{name} of {kind} of {tuple(param.shape)}: {number_of} instead of {rounded}")
    dist.barrier()
    return faults


@EACH_STAGE
def test_norms_and_sums_in_fp32_are_the_rounded_ones(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_exactly_rounded, stage) == [[], []]


def along_dimensions(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    grad = weight(model).grad
    found = [grad.norm(dim=0), grad.max(-1).values, grad.abs().min(dim=1, keepdim=True)[0].squeeze(1), grad.amax(dim=0)]
    found.append(torch.max(grad, other=grad.abs())[0])
    with torch.no_grad():
        assert torch.arange(8.0).to(weight(model).data).shape == torch.arange(8).type_as(weight(model)).shape == (8,)
        found += [F.softmax(weight(model), dim=1)[0], F.normalize(weight(model).data, dim=0)[1]]
    counts = [torch.where(grad > 0)[0].numel(), torch.unique(grad).numel(), *[0] * 6]
    return torch.stack([*found, torch.tensor(counts, dtype=torch.float32)])


def beside_full_tensors(model: nn.Module, loss: Loss) -> Tensor:
    """Masks, averages and values in the shape of the whole."""
    mask = torch.arange(64.0).view(8, 8) % 3
    average, mean = torch.zeros(8, 8), torch.zeros(8)
    weight(model).register_hook(lambda grad: grad * mask)
    loss().backward()
    model[0][0].weight.grad.mul_(torch.arange(6.0))
    model[2].weight.grad = model[2].weight.grad * torch.ones(3, 8) * 2
    average.lerp_(weight(model).detach(), 0.25)
    average = average + weight(model).grad
    with torch.no_grad():
        weight(model).mul_(mask)
        model[2].get_parameter("weight").copy_(torch.ones(3, 8))
        model[0][0].get_parameter("bias").data = torch.arange(8.0)
        for layer in (model[0][0], model[2]):  # also a bias that is on one rank alone
            layer.weight -= 0.5 * layer.weight.grad
            layer.bias -= 0.5 * layer.bias.grad
            mean[:8].lerp_(model[0][0].get_parameter("bias"), 0.5)
        flat = torch.zeros(sum(param.numel() for param in model.parameters()))
        place = 0
        for param in model.parameters():
            flat[place : place + param.numel()] = param.grad.view(-1)
            flat[place : place + param.numel()].mul_(2.0)
            param.grad.copy_(flat[place : place + param.numel()].view_as(param))
            place += param.numel()
    return average.norm() + mean.sum() + (mask - weight(model).detach()).abs().sum()


def into_plain_tensors(model: nn.Module, loss: Loss) -> Tensor:
    """Of the shape of the whole, they get the whole."""
    loss().backward()
    found = []
    for param in model.parameters():
        total = torch.zeros(param.shape)
        total.add_(param.grad).mul_(param.grad)
        with torch.no_grad():
            total += param
        rows = torch.zeros(2, *param.shape)
        rows[1] = param.grad
        rows[0].copy_(param.detach())
        found += [total.sum(), rows.flatten().norm(), torch.equal(rows[1], param.grad) + torch.zeros(())]
    return torch.stack(found)


def parameters_of_one_shape(model: nn.Module, loss: Loss) -> Tensor:
    """They are cut in other places."""
    loss().backward()
    first, second = model[0][0].get_parameter("bias"), model[1][0].get_parameter("bias")
    with torch.no_grad():
        first.copy_(second)
        second.add_(first.grad, alpha=0.5)
        both = first * second + weight(model)[0]
        weight(model).mul_(first)
    return torch.stack([both.norm(), (first.grad - second.grad).abs().max(), weight(model).detach().sum()])


def weighted_by_gradients(model: nn.Module, loss: Loss) -> Tensor:
    """A penalty with weights from an earlier backward (elastic weight consolidation)."""
    loss().backward()
    fisher = {name: param.grad.clone().pow(2) for name, param in model.named_parameters()}
    old = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    model.zero_grad()
    penalty = sum((fisher[name] * (param - old[name]) ** 2).sum() for name, param in model.named_parameters())
    penalty.backward()
    return penalty.detach()


def gradients_of_a_matrix(model: nn.Module, loss: Loss) -> Tensor:
    """An output in the shape of a parameter, with a gradient for it."""
    out = torch.ones(8, 8) @ (loss() * torch.ones(8, 8))
    grads = torch.autograd.grad(out, list(model.parameters()), torch.full((8, 8), 0.5))
    return torch.stack([grad.norm() for grad in grads])


def joined_with_plain(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    return torch.cat([*(param.grad.flatten() for param in model.parameters()), torch.ones(3)]).norm()


def hooks_in_turn(model: nn.Module, loss: Loss) -> Tensor:
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    loss(0).backward()
    loss(1).backward()
    handle = weight(model).register_hook(lambda grad: grad * 0)
    loss(2).backward()
    handle.remove()
    return weight(model).grad.norm()


def norms_in_hooks_of_what_is_asked_for(model: nn.Module, loss: Loss) -> Tensor:
    param, seen = weight(model), []
    param.register_hook(lambda grad: grad / grad.norm())
    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.abs().max()))
    (asked,) = torch.autograd.grad(loss(), [param])
    loss().backward(inputs=[param])
    return torch.stack([asked.abs().sum(), *seen])


def views_in_hooks(model: nn.Module, loss: Loss) -> Tensor:
    """Hooks that only look at rows of their gradient, and one that edits it by a view and by its name."""
    seen, kept = [], []

    def edit(grad: Tensor) -> None:
        grad[0] = 0
        grad[1].mul_(2)
        grad.mul_(0.5)

    weight(model).register_hook(lambda grad: seen.append(grad[0].sum() + grad.T[1].max()))
    model[2].get_parameter("weight").register_hook(edit)
    model[2].get_parameter("bias").register_hook(lambda grad: grad[:2].sum() * grad)
    model[0][0].get_parameter("weight").register_hook(kept.append)
    loss(0).backward()
    loss(1).backward()
    model[0][0].weight.grad.zero_()
    return torch.stack([*seen, *(grad[1].sum() for grad in kept)])


def views_of_assigned_gradients(model: nn.Module, loss: Loss) -> Tensor:
    """What was computed from a gradient and is the gradient now, held under a name of its own."""
    loss().backward()
    halved = weight(model).grad * 0.5
    weight(model).grad = halved
    found = [halved[0].sum(), halved.T[1].max()]
    halved[2] = 0
    halved[3].mul_(2)
    sgd(model).step()
    return torch.stack([*found, halved.norm()])


def wider_numbers_beside_gradients(model: nn.Module, loss: Loss) -> list[torch.dtype]:
    """One element in one dimension decides the dtype, one without dimensions does not."""
    loss().backward()
    grad = weight(model).grad
    one = torch.ones(1, dtype=torch.float64)
    listed = torch._foreach_mul([grad, model[2].weight.grad], [one, one[0]])
    found = [grad * one, one + grad, grad * one[0], torch.lerp(grad.double(), grad.double(), one), *listed]
    return [each.dtype for each in [*found, grad.bfloat16() * torch.ones(1), grad.mul_(one.reshape(1, 1))]]


def arguments_by_name(model: nn.Module, loss: Loss) -> list[Tensor]:
    """The first argument is the first that the function has, not the first that is called `input`."""
    loss().backward()
    grad, bias = weight(model).grad, model[0][0].bias.grad
    chosen = torch.where(input=grad, other=torch.zeros(()), condition=grad > 0)
    assert isinstance(chosen, type(grad * 1))  # computed as any elementwise function's result is
    found = [chosen.sum(), torch.where(condition=grad > 0)[0].sum(), torch.dot(tensor=bias, input=bias.abs())]
    found.append(torch.searchsorted(input=grad, sorted_sequence=torch.tensor([-0.01, 0.0, 0.01])).sum())
    return torch.stack([each.double() for each in found])


def views_beside_other_gradients(model: nn.Module, loss: Loss) -> Tensor:
    """A gradient does not change when that of another parameter of its module does."""
    loss().backward()
    row = weight(model).grad[0]
    model[1][0].bias.grad.mul_(2)
    found = [row.sum()]
    row.mul_(2)
    bias = model[1][0].bias.grad[2:]
    weight(model).grad.mul_(0.5)
    return torch.stack([*found, bias.sum()])


IDIOMS = [
    held_over_steps,
    views_beside_other_gradients,
    arguments_by_name,
    views_of_assigned_gradients,
    wider_numbers_beside_gradients,
    views_in_hooks,
    rows_of_gradients,
    edits_of_views,
    rows_of_parameters,
    shapes_of_gradients,
    along_dimensions,
    beside_full_tensors,
    into_plain_tensors,
    parameters_of_one_shape,
    weighted_by_gradients,
    joined_with_plain,
    hooks_in_turn,
    gradients_of_a_matrix,
    norms_in_double,
    norms_in_hooks_of_what_is_asked_for,
]


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


def _unseen_writes(rank: int, world: int) -> list[str]:
    """What is refused of views of gradients: to be written to by functions that cannot say so, and to be read when the
    gradient is another."""
    model = net()
    rg.shard(model, 3)
    model(batch(rank)).sum().backward()
    grad = weight(model).grad
    with pytest.raises(RuntimeError, match="inference tensor"):
        torch.neg(torch.ones(8), out=grad[0])
    with pytest.raises(RuntimeError, match="inference tensor"):
        torch._foreach_zero_([grad[0], grad.T[1]])
    row, column = grad[0], grad.T[0]
    assert row.add_(1)[0] == grad[0, 0]
    said = []
    for use in (lambda: column.sum(), lambda: column[1] + 1, lambda: grad.add_(column), lambda: grad.mul(column[0])):
        with pytest.raises(rg.UnsupportedError) as refused:
            use()
        said.append(str(refused.value))
    grad.add_(row)  # this one was edited itself
    with pytest.raises(rg.UnsupportedError):
        print(row)
    row.zero_()
    assert not row.any() and column.shape == (8,)
    dist.barrier()
    return said


def test_what_views_of_gradients_are_not_for(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(_unseen_writes)):
        assert len(said) == 4
        assert all(each.startswith(f"rank {rank}: parameter 1.0.weight: a view of its gradient") for each in said)
        assert all("take the view anew" in each for each in said)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.weight


def _beside_no_dimensions(model: nn.Module) -> list[Tensor]:
    """What a gradient without dimensions gives beside tensors without dimensions, which decide the dtype with it."""
    model(torch.full((3,), 1 / 3)).pow(2).sum().backward()
    p = model.get_parameter("scale")
    third, whole = torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(3)
    found = [p.grad * third, third / p.grad, torch.add(p.grad, third, alpha=2), p.grad * whole, p.grad * (1 / 3)]
    found += [torch.where(p.grad > 0, p.grad, third), *torch._foreach_mul([p.grad], [third]), p.detach() * third]
    half = torch.tensor(0.5, dtype=torch.float64)  # taken as a number, which no tensor with dimensions is
    found += [torch.add(p.grad, third, alpha=half), p.grad.masked_fill(p.grad > 0, third), p.grad.clone().fill_(third)]
    found += [p.grad.clone().add_(p.grad, alpha=half), p.grad.clone().masked_fill_(p.grad > 0, half)]
    found += [p.grad.clone().mul_(third), model.get_parameter("weight").grad * third]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def _differ_beside_no_dimensions(rank: int, world: int, stage: int) -> list[str]:
    model = Scaled()
    rg.shard(model, stage)
    pairs = list(zip(_beside_no_dimensions(model), _beside_no_dimensions(Scaled()), strict=True))
    dist.barrier()
    return [f"{ours} instead of {torchs}" for ours, torchs in pairs if not _same(ours, torchs)]


def _same(ours: Tensor, torchs: Tensor) -> bool:
    return ours.dtype is torchs.dtype and torch.equal(ours, torchs)


@OPPOSITE_STAGES
def test_dtypes_beside_what_has_no_dimensions(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_differ_beside_no_dimensions, stage) == [[], []]
