"""Rows beyond the published matrix."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.patterns.context import Context
from tests.patterns.models import Batch
from tests.patterns.registry import row

BOTH = ("mlp", "gpt")
NESTED = [f"{model}-{kind}-nested" for model in BOTH for kind in ("remat", "reentrant")]


@row("E1", "backward in another thread", BOTH)
def backward_in_thread(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@row("E2", "nested activation checkpoints", NESTED)
def nested_remat(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


@row("E3", "stages cut by `detach()`, backward from gradient to gradient", BOTH)
def detached_stages(model: nn.Module, batch: Batch, ctx: Context) -> None:
    first = model.walk(model.embed(batch.x), (0, 1))
    cut = first.detach().requires_grad_()
    ctx.loss(model.read(model.blocks[2](cut)), batch).backward()
    first.backward(cut.grad)


@row("E4", "the user's own saved-tensor hooks around the forward (`save_on_cpu`)", BOTH)
def own_saved_tensor_hooks(model: nn.Module, batch: Batch, ctx: Context) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = ctx.loss(model(batch.x), batch)
    loss.backward()


@row("E5", "a forward without grad, and in eval mode, between forward and backward", ("gpt", "conv"))
def evaluation_between(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    model.eval()
    with torch.no_grad():
        ctx.loss(model(ctx.micro(0).x), ctx.micro(0))
    model.train()
    loss.backward()


@row("E8", "a forward whose graph is dropped without a backward", BOTH)
def dropped_graph(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.aux(model(ctx.micro(0).x).softmax(dim=-1))
    ctx.loss(model(batch.x), batch).backward()


class SavedWeight(torch.autograd.Function):
    @staticmethod
    def forward(fn: Any, x: Tensor, weight: Tensor) -> Tensor:
        fn.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = fn.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class KeptWeight(torch.autograd.Function):
    """Keeps the weight as a plain attribute, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(fn: Any, x: Tensor, weight: Tensor) -> Tensor:
        fn.save_for_backward(x)
        fn.weight = weight.detach()
        return x @ weight.t()

    @staticmethod
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = fn.saved_tensors
        return grad @ fn.weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


@row("E6", "custom Functions that save a weight, by the book and as an attribute", BOTH)
def custom_functions(model: nn.Module, batch: Batch, ctx: Context) -> None:
    hidden = model.embed(batch.x)
    saved = SavedWeight.apply(hidden, model.blocks[0].up.weight)
    kept = KeptWeight.apply(hidden, model.blocks[1].up.weight)
    (ctx.loss(model(batch.x), batch) + saved.pow(2).mean() + kept.pow(2).mean()).backward()


@row("E7", "the optimizer is made before sharding", BOTH, optimizer_first=True)
def early_optimizer(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()
