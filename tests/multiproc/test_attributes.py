"""What people do with `module.weight` itself, which in torch is the parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from tests.harness import RankPool
from tests.multiproc.test_idioms import STAGES, Idiom, Loss, batch, both, net, sgd


# ---- torch.autograd.grad
def gradient(model: nn.Module, loss: Loss) -> Tensor:
    (found,) = torch.autograd.grad(loss(), model[1][0].weight)
    return found


def gradients_of_several(model: nn.Module, loss: Loss) -> Tensor:
    weights = [model[1][0].weight, model[1][0].bias, model[0][0].bias, model[1][0].weight]
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(), weights)])


def by_its_edge(model: nn.Module, loss: Loss) -> Tensor:
    (found,) = torch.autograd.grad(loss(), torch.autograd.graph.get_gradient_edge(model[1][0].weight))
    return found


def adaptive_weight(model: nn.Module, loss: Loss) -> None:
    """Two losses balanced by their gradients of the last layer (VQGAN)."""
    last, first, second = model[2].weight, loss(0), loss(1)
    norms = [torch.autograd.grad(each, last, retain_graph=True)[0].norm() for each in (first, second)]
    (first + (norms[0] / (norms[1] + 1e-4)).clamp(0, 1e4).detach() * second).backward()


def by_hand(model: nn.Module, loss: Loss) -> None:
    for step in range(2):
        weight = model[1][0].weight
        (grad,) = torch.autograd.grad(loss(step), weight)
        with torch.no_grad():
            weight -= 0.1 * grad


def projected(model: nn.Module, loss: Loss) -> None:
    """Gradients of two tasks, without what each has against the other (PCGrad)."""
    weights = [model[1][0].weight, model[2].weight]
    first, second = (torch.autograd.grad(loss(task), weights) for task in (0, 1))
    for weight, a, b in zip(weights, first, second, strict=True):
        weight.grad = a - (a * b).sum().clamp(max=0) * b / b.norm() ** 2 + b


def penalty(model: nn.Module, loss: Loss) -> None:
    weights = [model[0][0].weight, model[1][0].weight]
    grads = torch.autograd.grad(loss(), weights, create_graph=True)
    (loss(1) + sum(grad.pow(2).sum() for grad in grads) * 8).backward()


def third_derivative(model: nn.Module, loss: Loss) -> None:
    weight = model[1][0].weight
    (first,) = torch.autograd.grad(loss(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), weight, create_graph=True)
    second.pow(2).sum().backward()


def inner_step(model: nn.Module, loss: Loss) -> None:
    """The outer loss is one of a weight after a step (MAML)."""
    weight = model[2].weight
    (grad,) = torch.autograd.grad(loss(), weight, create_graph=True)
    F.linear(torch.ones(4, 8), weight - 0.5 * grad).pow(2).mean().backward()


def and_then_backward(model: nn.Module, loss: Loss) -> Tensor:
    value = loss()
    (found,) = torch.autograd.grad(value, model[1][0].weight, retain_graph=True)
    value.backward()
    return found


# ---- hooks
def clamping_hook(model: nn.Module, loss: Loss) -> None:
    """The mean of what is clamped is not what is clamped of the mean."""
    model[1][0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    loss().backward()


def norms_in_hooks(model: nn.Module, loss: Loss) -> Tensor:
    seen: list[Tensor] = []
    handle = model[1][0].weight.register_hook(lambda grad: seen.append(grad.norm()))
    loss().backward()
    handle.remove()
    loss().backward()
    return torch.stack(seen)


def step_in_a_hook(model: nn.Module, loss: Loss) -> None:
    for weight in (model[1][0].weight, model[2].weight):
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
    for number in range(2):
        loss(number).backward()


# ---- optimizers
def optimized(model: nn.Module, loss: Loss) -> int:
    groups = [{"params": [model[1][0].weight], "lr": 0.1}, {"params": [model[2].weight, model[2].bias]}]
    optimizer = torch.optim.AdamW(groups)
    for step in range(3):
        optimizer.zero_grad()
        loss(step).backward()
        torch.nn.utils.clip_grad_norm_([model[1][0].weight, model[2].weight], 0.1)
        optimizer.step()
    return len(optimizer.state)


def resumed(model: nn.Module, loss: Loss) -> None:
    """What an optimizer is given before its first step is not lost."""
    first, second = (torch.optim.SGD([model[1][0].weight], lr=0.1, momentum=0.9) for _ in range(2))
    for step in range(2):
        loss(step).backward()
        first.step()
    second.load_state_dict(first.state_dict())
    second.step()


def optimized_once_unfrozen(model: nn.Module, loss: Loss) -> None:
    model[1][0].weight.requires_grad = False
    optimizer = torch.optim.SGD([model[1][0].weight, model[0][0].weight], lr=0.1, momentum=0.9)
    model[1][0].weight.requires_grad = True
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss(step).backward()
        optimizer.step()


IDIOMS = [
    gradient, gradients_of_several, by_its_edge, adaptive_weight, by_hand, projected, penalty, third_derivative,
    inner_step, and_then_backward, clamping_hook, norms_in_hooks, step_in_a_hook, optimized, resumed,
    optimized_once_unfrozen,
]  # fmt: skip


@STAGES
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Callable[[int], RankPool], idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


def _exact(rank: int, world: int, stage: int) -> bool:
    """Summed in rank order, so bit for bit the mean of what the ranks find alone."""
    model, plain = net(), net()
    engine = rg.shard(model, stage)
    with engine.no_sync():  # what is asked for is not kept back
        (found,) = torch.autograd.grad(model(batch(rank)).pow(2).mean(), model[1][0].weight)
    alone = [torch.autograd.grad(plain(batch(r)).pow(2).mean(), plain[1][0].weight)[0] for r in range(world)]
    dist.barrier()
    return torch.equal(found, sum(alone[1:], alone[0]) / world) and type(found) is Tensor


@STAGES
@pytest.mark.parametrize("world", (1, 2, 4))
def test_the_gradient_is_exact(ranks: Callable[[int], RankPool], world: int, stage: int) -> None:
    assert all(ranks(world).run(_exact, stage))


def _alone(rank: int, world: int) -> str:
    model = net()
    rg.shard(model, 3, timeout=2.0)
    loss = model(batch(rank)).pow(2).mean()
    with pytest.raises(rg.DivergenceError) as told:
        if rank == 0:
            torch.autograd.grad(loss, model[1][0].weight)
        else:
            loss.backward()
            sgd(model).step()
    return str(told.value)


def test_a_rank_that_asks_alone(ranks: Callable[[int], RankPool]) -> None:
    for said in ranks(2).run(_alone):
        assert "for module.weight itself, reduces unit 1" in said


def _inputs(rank: int, world: int, stage: int, others: bool) -> str:
    model = net()
    rg.shard(model, stage)
    leaves = [model.get_parameter("1.0.bias")] if others else []
    with pytest.raises(rg.UnsupportedError) as refused:
        model(batch(rank)).sum().backward(inputs=[model[1][0].weight, *leaves])
    model.zero_grad()
    model(batch(rank)).sum().backward()  # goes on
    assert all(param.grad is not None for param in model.parameters())
    dist.barrier()
    return str(refused.value)


@STAGES
@pytest.mark.parametrize("others", (False, True))
def test_as_an_input_of_backward(ranks: Callable[[int], RankPool], stage: int, others: bool) -> None:
    for said in ranks(2).run(_inputs, stage, others):
        assert "the full tensor of parameter 1.0.weight" in said and "model.get_parameter('1.0.weight')" in said
