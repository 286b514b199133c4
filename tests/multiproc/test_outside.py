"""Pieces in the hands of code that does not ask them: collectives by hand, files, vmap, buffers, changes of shape."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, sgd, weight
from tests.stages import EACH_STAGE


def saved(thing: Any) -> None:
    torch.save(thing, io.BytesIO())


@torch.library.custom_op("retrograde_tests::scaled", mutates_args=("x",))
def _scaled(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("retrograde_tests::add_to_", mutates_args=("total",))
def _add_to(x: Tensor, total: Tensor) -> None:
    """Its name says that it writes, and not to what."""
    total.add_(x)


@torch.library.custom_op("retrograde_tests::scale_all", mutates_args=("tensors",))
def _scale_all(tensors: list[Tensor], by: float) -> None:
    for tensor in tensors:
        tensor.mul_(by)


def _fused_sgd(params: list[Tensor], grads: list[Tensor]) -> None:
    off = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    with torch.no_grad():
        torch._fused_sgd_(params, grads, [], lr=0.1, is_first_step=True, **off)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], tuple[str, ...]]] = {
    "all_reduce by hand": (
        lambda model: [dist.all_reduce(param.grad) for param in model.parameters()],
        ("a collective of torch.distributed", "0.0.weight", "reduced its gradient already"),
    ),
    "broadcast by hand": (
        lambda model: dist.broadcast(weight(model).data, 0),
        ("a collective of torch.distributed", "1.0.weight", "rank 0's values"),
    ),
    "all_gather by hand": (
        lambda model: dist.all_gather([torch.empty(1)] * 2, weight(model).grad),
        ("a collective of torch.distributed", "p.grad.local"),
    ),
    "a list": (lambda model: dist.all_reduce_coalesced([weight(model).grad]), ("a collective", "1.0.weight")),
    "torch.save of p.data": (
        lambda model: saved({name: param.data for name, param in model.named_parameters()}),
        ("parameter 0.0.weight: pickling or saving this rank's piece", "model.state_dict()"),
    ),
    "torch.save of p.grad": (
        lambda model: saved([param.grad.cpu() for param in model.parameters()]),
        ("parameter 0.0.weight: pickling or saving this rank's piece", "p.grad.full_tensor()"),
    ),
    "pickle of what was computed": (
        lambda model: pickle.dumps(weight(model).grad * 2),
        ("parameter 1.0.weight: pickling or saving this rank's piece",),
    ),
    "vmap": (lambda model: torch.vmap(torch.sum)(weight(model).grad), ("torch.vmap", "p.grad.full_tensor()")),
    "a buffer": (
        lambda model: model.register_buffer("before", weight(model).detach().clone()),
        ("Sequential.before, a buffer", "module.weight.detach().clone()"),
    ),
    "a custom operator that writes": (
        lambda model: _scaled(weight(model).grad),
        ("parameter 1.0.weight: scaled writes to its arguments", "p.grad.local", "p.grad.full_tensor()"),
    ),
    "one that writes to a parameter": (
        lambda model: _scaled(weight(model)),
        ("parameter 1.0.weight: scaled writes to its arguments", "p.full_tensor().detach().clone()"),
    ),
    "one that writes to its second argument": (
        lambda model: _add_to(torch.ones(8, 8), weight(model).grad),
        ("parameter 1.0.weight: add_to_ writes to its arguments",),
    ),
    "one that is given a gradient by name": (
        lambda model: _add_to(weight(model).detach(), total=weight(model).grad),
        ("parameter 1.0.weight: add_to_ writes to its arguments",),
    ),
    "one that writes to a list": (
        lambda model: torch.ops.retrograde_tests.scale_all([torch.ones(2), weight(model).grad], 2.0),
        ("parameter 1.0.weight: scale_all writes to its arguments",),
    ),
    "a fused optimizer's function": (
        lambda model: _fused_sgd([weight(model)], [weight(model).grad]),
        ("parameter 1.0.weight: _fused_sgd_ writes to its arguments",),
    ),
    "out= of an operator": (
        lambda model: torch.ops.aten.mul.out(weight(model).grad, torch.tensor(2.0), out=weight(model).grad),
        ("parameter 1.0.weight: mul writes to its arguments",),
    ),
    "as_strided": (
        lambda model: weight(model).data.as_strided((2, 2), (4, 1), 0),
        ("parameter 1.0.weight: as_strided asks where in memory", "full_tensor().clone()"),
    ),
    "t_": (lambda model: weight(model).grad.t_(), ("t_ would change the shape",)),
    "t_ of a full tensor": (
        lambda model: model[1][0].weight.data.t_(),
        ("t_ would change the shape", "parameter 1.0.weight"),
    ),
    "set_": (lambda model: weight(model).grad.set_(torch.ones(8, 8)), ("1.0.weight.set_()", "p.data = value")),
}


def _refused(rank: int, world: int, name: str) -> str:
    model = net()
    rg.shard(model, 3)
    model(batch(rank)).sum().backward()
    do, _ = REFUSED[name]
    with pytest.raises(rg.UnsupportedError) as refused:
        do(model)
    sgd(model).step()  # goes on
    model(batch(rank)).sum().backward()
    dist.barrier()
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks: Ranks, name: str) -> None:
    for rank, said in enumerate(ranks(2).run(_refused, name)):
        assert said.startswith(f"rank {rank}: ")
        assert all(words in said for words in REFUSED[name][1]), said


# ---- what is right
def copies(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    copied = copy.deepcopy([param.grad for param in model.parameters()])
    return torch.stack([grad.norm() for grad in copied])


def side_by_side(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    grad = weight(model).grad
    return torch.cat([grad, grad * 2], dim=1)


def foreach_beside_wholes(model: nn.Module, loss: Loss) -> Tensor:
    """Masks in the shape of the whole, in lists."""
    loss().backward()
    params = [param for param in model.parameters() if param.dim() == 2]
    masks = [torch.arange(8.0) % 3 if param.grad.norm() > 0 else torch.ones(8) for param in params[1:]]
    torch._foreach_mul_([param.grad for param in params[1:]], masks)
    averages = [torch.zeros(param.shape) for param in params]
    torch._foreach_lerp_(averages, [param.detach() for param in params], 0.5)
    torch._foreach_add_([param.grad for param in params], averages)
    return torch.stack(torch._foreach_norm([param.grad for param in params]))


def operators_that_read(model: nn.Module, loss: Loss) -> Tensor:
    """Operators that write to plain tensors: of what is sharded they get the whole."""
    loss().backward()
    total, product = torch.ones(8, 8), torch.empty(8, 8)
    _add_to(weight(model).grad, total)
    _add_to(weight(model).detach(), total=total)
    torch.ops.aten.mul.out(weight(model).grad, total, out=product)
    whole = weight(model).grad.clone() if type(weight(model)) is nn.Parameter else weight(model).grad.full_tensor()
    _scaled(whole)
    weight(model).grad.copy_(whole)  # the way out that the error names
    return torch.stack([total, product])


@EACH_STAGE
@pytest.mark.parametrize(
    "idiom", (copies, side_by_side, foreach_beside_wholes, operators_that_read), ids=lambda idiom: idiom.__name__
)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


def _alone(rank: int, world: int) -> None:
    """A world of one has everything: collectives and files are right, and in the parameter's shape."""
    model, plain = net(), net()
    rg.shard(model, 3)
    for each in (model, plain):
        each(batch(0)).sum().backward()
    dist.all_reduce(weight(model).grad)
    again = pickle.loads(pickle.dumps(weight(model).grad))
    assert type(again) is Tensor and torch.equal(again, weight(plain).grad)


def test_a_world_of_one(ranks: Ranks) -> None:
    ranks(1).run(_alone)


def _elements(rank: int, world: int) -> int:
    """The way out that the errors name."""
    model = net()
    rg.shard(model, 3)
    model(batch(rank)).sum().backward()
    mine = weight(model).grad.local
    assert type(mine) is Tensor
    saved(mine)
    sizes = torch.tensor(mine.numel())
    dist.all_reduce(sizes)
    dist.barrier()
    return int(sizes)


def test_this_ranks_elements(ranks: Ranks) -> None:
    assert ranks(2).run(_elements) == [64, 64]
