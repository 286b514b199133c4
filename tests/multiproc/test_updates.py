"""Updates on plain tensors: who sees what while an optimizer steps, and what is left when a step raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from retrograde.ledger import Activity
from retrograde.parameters import ShardedParameter, ShardedTensor
from retrograde.parameters.elementwise import is_elementwise
from tests.harness import Ranks
from tests.multiproc.idioms import Loss, batch, both, net
from tests.stages import EACH_STAGE

Optimizer = torch.optim.Optimizer


class Averaging(Optimizer):
    """Elementwise, and says what it sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[type] = []
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["average"] = state["average"].lerp(param.grad, 0.5) if state else param.grad.clone()
            param.sub_(state["average"], alpha=0.25)
            self.seen += [type(param), type(param.grad), type(state["average"])]
            if self.fails:
                raise ValueError("in the middle of an update")
        return value


class Declared(Averaging):
    """The same, declared."""


rg.elementwise(Declared)


def test_which_are_elementwise() -> None:
    elementwise = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, Declared)
    others = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam, Averaging)
    assert [is_elementwise(cls) for cls in (*elementwise, *others)] == [True] * 4 + [False] * 5

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Renamed(torch.optim.AdamW):
        pass

    class OtherState(torch.optim.AdamW):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    assert [is_elementwise(cls) for cls in (Own, Renamed, OtherState)] == [False, True, False]
    with pytest.raises(rg.ShardingError, match="not a class of optimizers"):
        rg.elementwise(torch.optim.SGD([torch.ones(1)]))


# ---- the same numbers
def declared(model: nn.Module, loss: Loss) -> Tensor:
    return _trained(model, loss, Declared(model.parameters()))


def undeclared(model: nn.Module, loss: Loss) -> Tensor:
    return _trained(model, loss, Averaging(model.parameters()))


@rg.elementwise
class Replacing(Optimizer):
    """Gives its parameters other memory, as older optimizers do."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data = param.data - 2**-3 * param.grad


def replaced(model: nn.Module, loss: Loss) -> Tensor:
    optimizer = Replacing(model.parameters(), {})
    for step in range(3):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    return torch.stack([param.detach().norm() for param in model.parameters()])


def _trained(model: nn.Module, loss: Loss, optimizer: Averaging) -> Tensor:
    for step in range(3):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    for step in range(2):

        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            value = loss(step)
            value.backward()
            return value

        optimizer.step(again)
    return torch.stack([optimizer.state[param]["average"].norm() for param in model.parameters()])


@EACH_STAGE
@pytest.mark.parametrize("idiom", (declared, undeclared, replaced), ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Any, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


# ---- who sees what
def _seen(rank: int, world: int, stage: int) -> None:
    model = net()
    engine = rg.shard(model, stage)
    params = list(model.parameters())
    optimizer = Declared(params)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append([type(param) for param in params])
        seen.append([param.grad is None or isinstance(param.grad, ShardedTensor) for param in params])

    def closure() -> Tensor:
        look()
        value = model(batch(rank)).pow(2).sum()
        value.backward()
        return value

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    optimizer.step(closure)
    assert seen == [[ShardedParameter] * len(params), [True] * len(params)] * 3
    assert set(optimizer.seen) == {nn.Parameter, Tensor}
    assert all(isinstance(optimizer.state[param]["average"], ShardedTensor) for param in params)
    assert all(optimizer.state[param]["average"].shape == param.shape for param in params)
    model(batch(rank)).sum().backward()
    engine.ledger.clear()
    torch.optim.AdamW(params, fused=True).step()
    assert sum(entry.kind is Activity.AGREE for entry in engine.ledger.entries) == 1
    dist.barrier()


@EACH_STAGE
def test_who_sees_what(ranks: Ranks, stage: int) -> None:
    """Hooks and closures see sharded tensors; a declared update sees plain ones; an update is one meeting."""
    ranks(2).run(_seen, stage)


def _raised(rank: int, world: int, cls: type[Averaging]) -> None:
    model = net()
    rg.shard(model, 3)
    params = list(model.parameters())
    optimizer = cls(params)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(batch(rank)).sum().backward()
    optimizer.fails = True
    with pytest.raises(ValueError, match="in the middle of an update"):
        optimizer.step()
    assert all(type(param) is ShardedParameter and isinstance(param.grad, ShardedTensor) for param in params)
    assert isinstance(optimizer.state[params[0]]["average"], ShardedTensor)
    after = model.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed == ["0.0.weight"]  # as in torch: what was done is done
    optimizer.fails = False
    optimizer.zero_grad()
    model(batch(rank)).sum().backward()
    optimizer.step()
    dist.barrier()


@pytest.mark.parametrize("cls", (Averaging, Declared), ids=lambda cls: cls.__name__)
def test_a_step_that_raises(ranks: Ranks, cls: type[Averaging]) -> None:
    ranks(2).run(_raised, cls)


# ---- updates that read while they write
class OneRankLooks(Optimizer):
    """Rank 0 reads each whole parameter; the others go on to a value that all ranks compute."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if dist.get_rank() == 0:
                param.full_tensor()
            param.sub_(param.grad / (1 + param.grad.abs().sum()))


class SlowAndSilent(Optimizer):
    """Writes memory that nobody is told of, later on rank 1 than on rank 0."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if dist.get_rank() == 1:
            time.sleep(0.3)
        for param in self.param_groups[0]["params"]:
            param.local.sub_(param.grad.local)


def _read_in_an_update(rank: int, world: int, stage: int, cls: type[Optimizer]) -> None:
    model = net()
    rg.shard(model, stage, timeout=20)
    optimizer = cls(model.parameters(), {})
    for step in range(2):
        expected = [_updated(param, cls) for param in _with_gradients(model, step)]
        optimizer.step()
        for param, new in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.full_tensor(), new)
        optimizer.zero_grad()
    dist.barrier()


def _with_gradients(model: nn.Module, step: int) -> list[nn.Parameter]:
    model(batch(step)).sum().backward()
    return list(model.parameters())


def _updated(param: Any, cls: type[Optimizer]) -> Tensor:
    weight, grad = param.full_tensor().clone(), param.grad.full_tensor()
    scale = 1 if cls is SlowAndSilent else 1 + param.grad.abs().sum()
    return weight - grad / scale


@EACH_STAGE
@pytest.mark.parametrize("cls", (OneRankLooks, SlowAndSilent), ids=lambda cls: cls.__name__)
def test_reads_in_an_update(ranks: Ranks, stage: int, cls: type[Optimizer]) -> None:
    """A rank that reads weights in an update is served by ranks in the same update; one that has finished its update
    waits for those that have not."""
    ranks(2).run(_read_in_an_update, stage, cls)


# ---- what others put around a step
class Wrapped(Optimizer):
    """Its `step` is wrapped after torch has wrapped it, as Dynamo does with some."""

    def step(self) -> None:  # type: ignore[override]
        """Changes nothing."""


class Hidden(Optimizer):
    """So is this one's, and nothing says what is inside."""

    def step(self) -> None:  # type: ignore[override]
        """Changes nothing."""


def _replaced(rank: int, world: int) -> str:
    model = net()
    rg.shard(model, 3)
    wrapped, hidden = Wrapped(model.parameters(), {}), Hidden(model.parameters(), {})
    Wrapped.step = torch.compiler.disable(Wrapped.step)  # type: ignore[method-assign]
    inside = Hidden.step
    Hidden.step = lambda self: inside(self)  # type: ignore[assignment, method-assign]
    model(batch(rank)).sum().backward()
    clock = model._retrograde_engine._fence.clock
    wrapped.step()
    assert model._retrograde_engine._fence.clock == clock + 1
    with pytest.raises(rg.UnsupportedError) as refused:
        hidden.step()
    dist.barrier()
    return str(refused.value)


def test_replaced_steps(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(_replaced)):
        assert said.startswith(f"rank {rank}: parameter 0.0.weight: Hidden.step was replaced")
        assert "functools.wraps" in said
