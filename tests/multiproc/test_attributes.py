"""What people do with `module.weight` itself, which in torch is the parameter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, sgd
from tests.reference import mean
from tests.stages import EACH_STAGE, EACH_WORLD


# ---- torch.autograd.grad
def gradient(model: nn.Module, loss: Loss) -> Tensor:
    (found,) = torch.autograd.grad(loss(), model[1][0].weight)
    return found


def gradients_of_several(model: nn.Module, loss: Loss) -> Tensor:
    weights = [model[1][0].weight, model[1][0].bias, model[0][0].bias, model[1][0].weight]
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss(), weights)])


def beside_parameters(model: nn.Module, loss: Loss) -> Tensor:
    """Full tensors and parameters of the same unit in one call, and one of them twice."""
    asked = [model[1][0].weight, model.get_parameter("1.0.bias"), model.get_parameter("1.0.weight"), model[0][0].bias]
    weight, *others = torch.autograd.grad(loss(), asked)
    return torch.cat([weight.flatten(), *(grad.norm().view(1) for grad in others)])


def beside_parameters_again(model: nn.Module, loss: Loss) -> None:
    asked = [model[1][0].weight, model.get_parameter("1.0.bias")]
    grads = torch.autograd.grad(loss(), asked, create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


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
    for name in ("1.0", "2"):
        optimizer = torch.optim.SGD([model.get_parameter(f"{name}.weight")], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        model.get_submodule(name).weight.register_post_accumulate_grad_hook(step)
    for number in range(2):
        loss(number).backward()


IDIOMS = [
    gradient,
    gradients_of_several,
    beside_parameters,
    beside_parameters_again,
    by_its_edge,
    adaptive_weight,
    by_hand,
    projected,
    penalty,
    third_derivative,
    inner_step,
    and_then_backward,
    clamping_hook,
    norms_in_hooks,
    step_in_a_hook,
]


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


def _exact(rank: int, world: int, stage: int) -> bool:
    """Summed in rank order, so bit for bit the mean of what the ranks find alone."""
    model, plain = net(), net()
    engine = rg.shard(model, stage)
    with engine.no_sync():  # what is asked for is not kept back
        (found,) = torch.autograd.grad(model(batch(rank)).pow(2).mean(), model[1][0].weight)
    alone = [torch.autograd.grad(plain(batch(r)).pow(2).mean(), plain[1][0].weight)[0] for r in range(world)]
    dist.barrier()
    return torch.equal(found, mean(alone, world)) and type(found) is Tensor


@EACH_STAGE
@EACH_WORLD
def test_the_gradient_is_exact(ranks: Ranks, world: int, stage: int) -> None:
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


def test_a_rank_that_asks_alone(ranks: Ranks) -> None:
    for said in ranks(2).run(_alone):
        assert "for module.weight itself, reduces unit 1" in said


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.shared, self.b = (nn.Linear(6, 6) for _ in range(3))


def _routed(rank: int, world: int) -> str:
    """Ranks that use other parameters of the unit: their gradients must not be added up as if they were one."""
    model = Experts()
    rg.shard(model, 3, timeout=5.0)
    expert = model.a if rank == 0 else model.b
    with pytest.raises(rg.DivergenceError) as told:
        torch.autograd.grad(model.shared(expert(batch(rank))).pow(2).mean(), model.shared.weight)
        model.state_dict()
    return str(told.value)


def test_ranks_that_use_other_parameters_of_the_unit(ranks: Ranks) -> None:
    for said in ranks(2).run(_routed):
        assert "for module.weight itself, reduces unit (root)" in said


def _ends(rank: int, world: int) -> str:
    """A graph made in new threads may bring a unit after the end at which the others brought it (gradients/flow.py)."""
    model = net()
    rg.shard(model, 3, timeout=5.0)

    def losses() -> Tensor:
        return model(batch(rank)).pow(2).mean()

    def in_a_thread() -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(losses).result()

    found = losses() if rank else in_a_thread()
    try:
        grads = torch.autograd.grad(found, list(model.parameters()))
        return str([grad.norm() for grad in grads])
    except rg.DivergenceError as told:
        return str(told)


def test_ranks_that_end_a_backward_at_different_points(ranks: Ranks) -> None:
    for said in ranks(2).run(_ends):
        assert "others ended this backward before unit" in said


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


@EACH_STAGE
@pytest.mark.parametrize("others", (False, True))
def test_as_an_input_of_backward(ranks: Ranks, stage: int, others: bool) -> None:
    for said in ranks(2).run(_inputs, stage, others):
        assert "the full tensor of parameter 1.0.weight" in said and "model.get_parameter('1.0.weight')" in said
