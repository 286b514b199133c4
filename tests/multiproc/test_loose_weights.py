"""Weights that are used outside of any module's forward, where graphs have no handles: when torch refuses the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.reference import same
from tests.small import backwards, batch, build
from tests.stages import ALONE_OR_NOT, EACH_STAGE, PAGE_STAGES

UP = "blocks.1.up.weight"
OTHER = "blocks.1.down.weight"  # of the same unit
Change = Callable[[nn.Module], object]


def _used(model: nn.Module) -> Tensor:
    """A graph that has two views of weights, without handles."""
    ids = torch.linspace(-1.0, 1.0, 12).expand(2, 12).clone().requires_grad_()
    return ((ids @ model.blocks[1].up.weight.T) @ model.blocks[1].down.weight.T).sum()


def _mul(name: str) -> Change:
    return torch.no_grad()(lambda model: model.get_parameter(name).mul_(2))


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p for n, p in model.named_parameters() if n == UP], 2)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def _step(model: nn.Module) -> None:
    """A step of what gradients have come to: of all but frozen parameters."""
    backwards(0)(model, 0)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()


def _step_without(model: nn.Module) -> None:
    """A step that leaves the unit's two matrices as they are, and changes its other parameters."""
    backwards(0)(model, 0)
    torch.optim.SGD([p for n, p in model.named_parameters() if n not in (UP, OTHER)], lr=0.5).step()
    model.zero_grad()


def _read_again(change: Change) -> Change:
    def changed(model: nn.Module) -> None:
        change(model)
        model(batch(0))

    return changed


CHANGES: dict[str, Change] = {
    "p.mul_": _mul(UP),
    "p.mul_, read again": _read_again(_mul(UP)),
    "of a bias": _mul("blocks.1.up.bias"),
    "of a bias, read again": _read_again(_mul("blocks.1.up.bias")),
    "p.data.mul_": torch.no_grad()(lambda model: model.get_parameter(UP).detach().mul_(2)),
    "foreach": _foreach,
    "module.weight.mul_": torch.no_grad()(lambda model: model.blocks[1].up.weight.mul_(2)),
    "foreach of module.weight": torch.no_grad()(lambda model: torch._foreach_mul_([model.blocks[1].up.weight], 2)),
    "load_state_dict": _load,
    "step": _step,
    "step, read again": _read_again(_step),
    "step without": _step_without,
    "step without, read again": _read_again(_step_without),
    "nothing": lambda model: None,
    "nothing, read again": _read_again(lambda model: None),
}


def _come_together() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _found(model: nn.Module, change: Change) -> str:
    """What a backward after the change says, or does not. Some changes do not wait for others that read."""
    graph = _used(model)
    _come_together()
    change(model)
    _come_together()
    try:
        graph.backward()
    except RuntimeError as error:
        return "refused" if "modified by an inplace operation" in str(error) else f"another error: {error}"
    return "runs"


def _make(frozen: tuple[str, ...]) -> nn.Module:
    model = build()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def _differences(rank: int, world: int, stage: int, transport: str) -> list[str]:
    differences = []
    for name, frozen in itertools.product(CHANGES, ((), (UP,), (UP, OTHER))):
        model, plain = _make(frozen), _make(frozen)
        engine = rg.shard(model, stage, timeout=15.0, transport=transport)
        said, wanted = _found(model, CHANGES[name]), _found(plain, CHANGES[name])
        if said != wanted:
            differences.append(f"{name}, frozen: {frozen}: {said} instead of {wanted}")
        if wanted != "runs":
            engine.full_grads()  # of a backward that has raised no gradient comes, where torch has those up to there
            continue
        for each, grad in engine.full_grads().items():
            of_torch = plain.get_parameter(each).grad
            if (grad is None) != (of_torch is None) or (grad is not None and not same(grad, of_torch)):
                differences.append(f"{name}, frozen: {frozen}: the gradient of {each}")
        dist.barrier()
    return differences


@ALONE_OR_NOT
@EACH_STAGE
def test_a_change_between_use_and_backward(ranks: Ranks, stage: int, world: int) -> None:
    assert ranks(world).run(_differences, stage, "auto") == [[]] * world


@PAGE_STAGES
def test_a_change_between_use_and_backward_by_collectives(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_differences, stage, "collective") == [[]] * 2
