"""Parameters of which a rank has no element: one of them is updated for the others, and all are what they would be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Loss, batch, both
from tests.stages import EACH_STAGE


class Scale(nn.Module):
    """One element: the other rank has nothing of its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def net() -> nn.Sequential:
    """Units of so many small parameters that each rank has no element of several."""
    torch.manual_seed(0)
    block = [nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))) for _ in range(2)]
    return nn.Sequential(*block, Scale())


def _step(optimizer: torch.optim.Optimizer, loss: Loss, number: int) -> None:
    optimizer.zero_grad()
    loss(number).backward()
    optimizer.step()


def _kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """How often each parameter was updated."""
    return [optimizer.state[param]["step"].item() for param in model.parameters()]


# ---- the same numbers as without
def adamw(model: nn.Module, loss: Loss) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    for number in range(4):
        _step(optimizer, loss, number)
    return _kept(model, optimizer)


def two_groups(model: nn.Module, loss: Loss) -> Any:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 2**-5}, {"params": params[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=2**-6, foreach=True)
    for number in range(4):
        _step(optimizer, loss, number)
    return _kept(model, optimizer)


def some_without_a_gradient(model: nn.Module, loss: Loss) -> Any:
    """In one step every third parameter has none; after it, it is a step behind."""
    optimizer = torch.optim.NAdam(model.parameters(), lr=2**-6)
    for number in range(5):
        optimizer.zero_grad()
        loss(number).backward()
        for param in list(model.parameters())[::3] if number == 2 else ():
            param.grad = None
        optimizer.step()
    return _kept(model, optimizer)


def numbers_set_by_hand(model: nn.Module, loss: Loss) -> Any:
    """What some do when they begin anew with a parameter: also without a trace in the version counter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6)
    for number in range(5):
        _step(optimizer, loss, number)
        param = list(model.parameters())[3 + number]
        optimizer.state[param]["step"].data.zero_()
        optimizer.state[param]["exp_avg"].zero_()
    return _kept(model, optimizer)


def loaded(model: nn.Module, loss: Loss) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6)
    for number in range(3):
        _step(optimizer, loss, number)
    saved = copy.deepcopy(optimizer.state_dict())
    _step(optimizer, loss, 3)
    optimizer.load_state_dict(saved)
    _step(optimizer, loss, 4)
    return _kept(model, optimizer)


def with_a_closure(model: nn.Module, loss: Loss) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6)

    def again() -> Tensor:
        optimizer.zero_grad()
        value = loss(1)
        value.backward()
        return value

    for number in range(3):
        _step(optimizer, loss, number)
        optimizer.step(again)  # type: ignore[arg-type]
    return _kept(model, optimizer)


def taken_before_a_closure(model: nn.Module, loss: Loss) -> Any:
    """An optimizer that looks at its group first; in one step the closure takes some gradients away."""
    optimizer = Eager(model.parameters())

    def again(number: int) -> Tensor:
        optimizer.zero_grad()
        value = loss(number)
        value.backward()
        for param in list(model.parameters())[::3] if number == 2 else ():
            param.grad = None
        return value

    for number in range(4):
        optimizer.step(lambda number=number: again(number))  # type: ignore[misc]
    return _kept(model, optimizer)


@rg.elementwise
class Eager(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        with torch.enable_grad():
            closure()
        for param in params:
            if param.grad is not None:
                self.state[param].setdefault("step", torch.zeros(())).add_(1)
                param.sub_(param.grad, alpha=2**-6)


IDIOMS = (
    adamw,
    two_groups,
    some_without_a_gradient,
    numbers_set_by_hand,
    loaded,
    with_a_closure,
    taken_before_a_closure,
)


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Callable[..., Any], stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


# ---- how many are gone through
@rg.elementwise
class Counting(torch.optim.Optimizer):
    """Keeps a number and a tensor for each parameter, and counts what it goes through."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen = 0
        self.fails = False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.seen = len(self.param_groups[0]["params"])
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state.setdefault("step", torch.zeros(())).add_(1)
            state.setdefault("average", torch.zeros_like(param)).add_(param.grad)
            param.sub_(state["average"], alpha=2**-6)
            if self.fails:
                raise ValueError("in the middle of an update")


def _counted(rank: int, world: int) -> None:
    model = net()
    rg.shard(model, 3)
    params = list(model.parameters())
    optimizer = Counting(params)
    mine = optimizer.param_groups[0]["params"]
    empty = sum(not param.local.numel() for param in params)
    assert empty >= 4
    seen = []
    for _ in range(4):
        model(batch(rank)).sum().backward()
        optimizer.step()
        seen.append(optimizer.seen)
    assert seen == [len(params)] + [len(params) - empty + 1] * 3
    assert optimizer.param_groups[0]["params"] is mine
    assert len(mine) == len(params)
    assert [optimizer.state[param]["step"].item() for param in params] == [4.0] * len(params)
    optimizer.fails = True
    with pytest.raises(ValueError, match="in the middle"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] is mine
    dist.barrier()


def test_one_is_gone_through_for_those_without_elements(ranks: Ranks) -> None:
    ranks(2).run(_counted)
