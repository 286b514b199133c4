"""Transforms of torch.func refuse pieces by name, and are right with whole tensors. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.transport import ThreadRanks
from tests import threads
from tests.stages import ALONE_OR_NOT
from tests.transport.chains import sharded

Params = dict[str, Tensor]
INPUT = torch.arange(12.0).view(3, 4)
# What torch's own jvp and linearize warn of.
QUIETLY = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is (deprecated|not supported)", "ignore:Attempted to insert a get_attr"
)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) * self.scale
        return out


def models(count: int) -> list[Scaled]:
    """Made before threads begin: random numbers are the process's."""
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        made.append(Scaled())
    return made


def scaled(scale: Tensor) -> Tensor:
    return (INPUT[:, :1] * scale).sum()


def loss(model: nn.Module) -> Callable[[Params], Tensor]:
    return lambda params: torch.func.functional_call(model, params, (INPUT,)).square().sum()


def ones(params: Params) -> Params:
    return {name: torch.ones_like(param) for name, param in params.items()}


TRANSFORMS: dict[str, Callable[[nn.Module, Params], Any]] = {
    "grad": lambda model, params: torch.func.grad(loss(model))(params),
    "grad of a scalar": lambda model, params: torch.func.grad(scaled)(params["scale"]),
    "grad beside another argument": lambda model, params: torch.func.grad(lambda x, scale: (x * scale).sum())(
        INPUT, params["scale"]
    ),
    "grad_and_value": lambda model, params: torch.func.grad_and_value(scaled)(params["scale"]),
    "vjp": lambda model, params: torch.func.vjp(loss(model), params)[1](torch.tensor(1.0)),
    "jacrev": lambda model, params: torch.func.jacrev(scaled)(params["scale"]),
    "vmap": lambda model, params: torch.func.vmap(torch.sum)(params["a.weight"]),
}


# These keep state that all threads of the process have in common, so ranks that are threads cannot run them at once.
FORWARD: dict[str, Callable[[nn.Module, Params], Any]] = {
    "jvp": lambda model, params: torch.func.jvp(loss(model), (params,), (ones(params),)),
    "jvp of a scalar": lambda model, params: torch.func.jvp(scaled, (params["scale"],), (torch.tensor(1.0),)),
    "jvp along a parameter": lambda model, params: torch.func.jvp(
        scaled, (torch.tensor(1.0),), (params["scale"].detach(),)
    ),
    "linearize": lambda model, params: torch.func.linearize(scaled, params["scale"])[1](torch.tensor(1.0)),
    "jacfwd": lambda model, params: torch.func.jacfwd(scaled)(params["scale"]),
    "hessian": lambda model, params: torch.func.hessian(scaled)(params["scale"]),
}
REFUSED = TRANSFORMS | FORWARD


@QUIETLY
@pytest.mark.parametrize("detached", (False, True))
@pytest.mark.parametrize(("name", "world"), [*((name, 1) for name in REFUSED), *((name, 2) for name in TRANSFORMS)])
def test_pieces_are_refused(name: str, detached: bool, world: int) -> None:
    made = models(world)

    def program(ranks: ThreadRanks) -> str:
        model = made[ranks.rank]
        sharded(ranks, model)
        params = {name: param.detach() if detached else param for name, param in model.named_parameters()}
        with pytest.raises(rg.UnsupportedError) as refused:
            REFUSED[name](model, params)
        model(INPUT).sum().backward()  # goes on
        return str(refused.value)

    for rank, said in enumerate(threads.run(world, program)):
        assert said.startswith(f"rank {rank}: "), said
        assert "torch.func" in said or "torch.vmap" in said, said
        assert "of parameter" in said and "p.full_tensor()" in said, said


@ALONE_OR_NOT
@pytest.mark.parametrize("name", TRANSFORMS)
def test_whole_tensors_are_right(name: str, world: int) -> None:
    *made, plain = models(world + 1)

    def program(ranks: ThreadRanks) -> Any:
        model = made[ranks.rank]
        engine = sharded(ranks, model)
        with engine.full_params() as whole:
            return TRANSFORMS[name](model, dict(whole))

    want = TRANSFORMS[name](plain, {name: param.detach() for name, param in plain.named_parameters()})
    for got in threads.run(world, program):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_vector_of_a_world_of_one_is_whole() -> None:
    """It is as it would be in torch: its memory has the parameter's shape."""
    (model,) = models(1)

    def program(ranks: ThreadRanks) -> Tensor:
        sharded(ranks, model)
        grad: Tensor = torch.func.grad(lambda bias: (bias * 2).sum())(model.get_parameter("a.bias").detach())
        return grad

    assert threads.run(1, program)[0].tolist() == [2.0] * 4
