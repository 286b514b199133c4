"""One rank's part of a case. The same code runs on a sharded model and on plain torch; `Side` is what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.models import Model, batch
from tests.fuzz.recipes import AGAIN, CHECKPOINT, REENTRANT, TILED, Act, Phase, Recipe
from tests.small import Raises

RATE = 2.0**-4


class Side(Protocol):
    rank: int
    model: Model

    def window(self, phase: Phase) -> AbstractContextManager[Any]: ...

    def assign(self, grads: dict[str, Tensor]) -> None:
        """`p.grad = g`."""

    def backward(self, act: Act) -> AbstractContextManager[None]:
        """Around a backward that does not raise."""

    def record(self, name: str, value: Tensor) -> None: ...


class Tiled(torch.autograd.Function):
    """Runs the backward of what it wraps in its own forward, as tiled losses do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        with torch.enable_grad():
            inside = h.detach().requires_grad_()
            loss = run(inside).sum()
            loss.backward()
        ctx.save_for_backward(inside.grad)
        return h + loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad + ctx.saved_tensors[0]


class Again(torch.autograd.Function):
    """Runs forward and backward of what it wraps in its own backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(h)
        return run(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        with torch.enable_grad():
            inside = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.run(inside)
        out.backward(grad)
        return None, inside.grad


WRAPPERS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    CHECKPOINT: lambda block, h: checkpoint(block, h, use_reentrant=False),
    REENTRANT: lambda block, h: checkpoint(block, h, use_reentrant=True),
    AGAIN: lambda block, h: Again.apply(block, h),
    TILED: lambda block, h: Tiled.apply(block, h),
}


class Player:
    """Does a rank's acts one after the other."""

    def __init__(self, recipe: Recipe, side: Side) -> None:
        self.recipe, self.side = recipe, side
        self._number = 0

    def phase(self, phase: Phase) -> None:
        with self.side.window(phase):
            for act in phase.acts[self.side.rank]:
                self._number += 1
                ACTS[act.kind](self, act)

    # ---- forward
    def forward(self, act: Act) -> tuple[Tensor, Tensor]:
        x = batch(self.recipe, self.side.rank, self._number)
        return x, self.side.model(x, act.path, self._around(act))

    def loss(self, act: Act) -> Tensor:
        return self.forward(act)[1].sum()

    def _around(self, act: Act) -> Callable[[int, Callable[[Tensor], Tensor], Tensor], Tensor]:
        wrapper = WRAPPERS.get(act.remat)

        def around(place: int, block: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
            here = place == act.at
            if here and act.kind == "raise forward":
                raise ArithmeticError("on purpose")
            if here and act.kind == "raise":
                h = Raises.apply(h, ArithmeticError("on purpose"))
            return wrapper(block, h) if wrapper is not None and here else block(h)

        return around

    # ---- acts
    def backward(self, act: Act) -> None:
        loss = self.loss(act)
        with self.side.backward(act):
            loss.backward()
        self.side.record("loss", loss)

    def retained(self, act: Act) -> None:
        loss = self.loss(act)
        for last in (False, True):
            with self.side.backward(act):
                loss.backward(retain_graph=not last)

    def two_losses(self, act: Act) -> None:
        out = self.forward(act)[1]
        main, aux = out[:, 0].sum(), out[:, 1].sum()
        with self.side.backward(act):
            main.backward(retain_graph=True)
        with self.side.backward(act):
            aux.backward()

    def forwards_first(self, act: Act) -> None:
        losses = [self.loss(act) for _ in range(2)]
        for loss in losses:
            with self.side.backward(act):
                loss.backward()

    def of_inputs(self, act: Act) -> None:
        loss = self.loss(act)
        wanted = [p for p in self._block(act).parameters() if p.requires_grad]
        with self.side.backward(act):
            loss.backward(inputs=wanted or list(self.side.model.head.parameters()))

    def input_gradient(self, act: Act) -> None:
        x, out = self.forward(act)
        with self.side.backward(act):
            (grad,) = torch.autograd.grad(out.sum(), x)
        self.side.record("input gradient", grad)

    def penalty(self, act: Act) -> None:
        x, out = self.forward(act)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with self.side.backward(act):
            (grad.pow(2).sum() + out.sum()).backward()

    def evaluate(self, act: Act) -> None:
        with torch.no_grad():
            self.side.record("evaluated", self.forward(act)[1])

    def dropped(self, act: Act) -> None:
        self.forward(act)

    def raise_forward(self, act: Act) -> None:
        with contextlib.suppress(ArithmeticError):
            self.forward(act)

    def raise_backward(self, act: Act) -> None:
        loss = self.loss(act)
        with contextlib.suppress(ArithmeticError):
            loss.backward()

    def assign(self, act: Act) -> None:
        loss = self.loss(act)
        named = {name: p for name, p in self.side.model.named_parameters() if p.requires_grad}
        with self.side.backward(act):
            grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        self.side.assign({name: grad for name, grad in zip(named, grads, strict=True) if grad is not None})

    def _block(self, act: Act) -> nn.Module:
        return self.side.model.blocks[act.path[act.at]]


ACTS: dict[str, Callable[[Player, Act], None]] = {
    "backward": Player.backward,
    "retained": Player.retained,
    "two losses": Player.two_losses,
    "forwards first": Player.forwards_first,
    "inputs": Player.of_inputs,
    "input gradient": Player.input_gradient,
    "penalty": Player.penalty,
    "evaluate": Player.evaluate,
    "dropped": Player.dropped,
    "raise forward": Player.raise_forward,
    "raise": Player.raise_backward,
    "assign": Player.assign,
}


# ---- what all ranks do together
@torch.no_grad()
def edit(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(-1.0)


@torch.no_grad()
def edit_weights(model: Model) -> None:
    """Through the modules: in true shapes."""
    model.head.weight.add_(1.0)
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight.clamp_(-1.0, 1.0)


def toggle(model: Model) -> None:
    """Freeze what is trained of the first block, and the other way round."""
    for param in model.blocks[0].parameters():
        param.requires_grad_(not param.requires_grad)


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Weights that steps have made fractions of are small whole numbers again, so that products stay exact."""
    for param in model.parameters():
        param.copy_(param.round().clamp(-1.0, 1.0))


def sgd(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    # Powers of two: their products are exact, so that a fused multiply-add makes no difference.
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.0 if recipe.exact else 0.5)


Together = Callable[[Recipe, Model, torch.optim.Optimizer], Any]


def _step(recipe: Recipe, model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    if recipe.exact:
        settle(model)


TOGETHER: dict[str, Together] = {
    "step": _step,
    "zero": lambda recipe, model, optimizer: optimizer.zero_grad(),
    "zeros": lambda recipe, model, optimizer: model.zero_grad(set_to_none=False),
    "clip value": lambda recipe, model, optimizer: clip_value(model),
    "clip norm": lambda recipe, model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0**40),
    "edit": lambda recipe, model, optimizer: edit(model),
    "edit weights": lambda recipe, model, optimizer: edit_weights(model),
    "toggle": lambda recipe, model, optimizer: toggle(model),
}


def clip_value(model: nn.Module) -> None:
    try:
        torch.nn.utils.clip_grad_value_(model.parameters(), 2.0)
    except RuntimeError as error:
        if "nested_tensorlist[0].empty()" not in str(error):  # so torch says where no parameter has a gradient
            raise


def install_hooks(recipe: Recipe, model: Model) -> None:
    if recipe.hooked:
        for param in model.blocks[0].parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: grad * 2)


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield
