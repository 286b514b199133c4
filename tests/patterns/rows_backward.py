"""Rows about how, when and how often backward is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.patterns.context import Context
from tests.patterns.models import Batch
from tests.patterns.registry import row

BOTH = ("mlp", "gpt")
ALL = ("mlp", "gpt", "tied-gpt", "conv", "lstm", "dataclass")
KINDS = [f"{model}-{kind}" for model in BOTH for kind in ("remat", "reentrant")]
REMAT = [f"{kind}-{where}" for kind in KINDS for where in ("inside", "around")]


@row("1", "plain backward", ALL, variants=True)
def plain(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


@row("2", "accumulate over 4 backwards, reduced each time", ("mlp", "gpt", "tied-gpt", "lstm"))
def accumulate(model: nn.Module, batch: Batch, ctx: Context) -> None:
    for index in range(4):
        part = ctx.micro(index)
        (ctx.loss(model(part.x), part) / 4).backward()


@row("3", "one forward, two losses, two backwards, `retain_graph=True` on the first", ALL)
def two_losses(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    torch.autograd.backward([ctx.loss(out, batch)], retain_graph=True)
    torch.autograd.backward([ctx.aux(out)])


@row("3b", "same, `zero_grad()` between", ("mlp", "gpt", "conv"))
def two_losses_zeroed(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.zero_grad()
    ctx.aux(out).backward()


@row("3b", "same, `zero_grad(set_to_none=False)` between")
def two_losses_zeroed_in_place(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.zero_grad(set_to_none=False)
    ctx.aux(out).backward()


@row("3c", "same, first loss from a middle layer", ("mlp", "gpt", "conv"))
def middle_loss(model: nn.Module, batch: Batch, ctx: Context) -> None:
    seen: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(batch.x)
    handle.remove()
    ctx.aux(seen[0]).backward(retain_graph=True)
    ctx.loss(out, batch).backward()


@row("4", "one loss, two backwards by hand: `loss.backward(retain_graph=True)`", ("mlp", "gpt", "lstm"))
def same_loss_twice(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    loss.backward(retain_graph=True)
    loss.backward()


@row("5", "4 forwards, then 4 backwards", BOTH)
def forwards_then_backwards(model: nn.Module, batch: Batch, ctx: Context) -> None:
    for loss in [ctx.loss(model(ctx.micro(i).x), ctx.micro(i)) for i in range(4)]:
        loss.backward()


@row("5", "4 forwards, then 4 backwards in reverse", BOTH)
def backwards_in_reverse(model: nn.Module, batch: Batch, ctx: Context) -> None:
    for loss in reversed([ctx.loss(model(ctx.micro(i).x), ctx.micro(i)) for i in range(4)]):
        loss.backward()


def _one_reduction(model: nn.Module, ctx: Context) -> None:
    counts = ctx.reductions()
    if counts is not None:
        assert set(counts.values()) == {1}, f"each unit is reduced once, not {counts}"


@row("6", "4 backwards in a coalescing window: exactly one reduction per unit", BOTH, after=_one_reduction)
def window(model: nn.Module, batch: Batch, ctx: Context) -> None:
    with ctx.coalesce():
        for index in range(4):
            part = ctx.micro(index)
            ctx.loss(model(part.x), part).backward()


@row("6", "a window over a kept graph and a second forward", BOTH, after=_one_reduction)
def window_retained(model: nn.Module, batch: Batch, ctx: Context) -> None:
    with ctx.coalesce():
        out = model(batch.x)
        ctx.loss(out, batch).backward(retain_graph=True)
        part = ctx.micro(0)
        ctx.loss(model(part.x), part).backward()
        ctx.aux(out).backward()


@row("6", "`zero_grad()` inside a window")
def window_zeroed(model: nn.Module, batch: Batch, ctx: Context) -> None:
    with ctx.coalesce():
        out = model(batch.x)
        ctx.loss(out, batch).backward(retain_graph=True)
        ctx.zero_grad()
        ctx.aux(out).backward()
        part = ctx.micro(0)
        ctx.loss(model(part.x), part).backward()


@row("6b", "two coalescing windows in one step", BOTH)
def two_windows(model: nn.Module, batch: Batch, ctx: Context) -> None:
    for start in (0, 2):
        with ctx.coalesce():
            for index in (start, start + 1):
                part = ctx.micro(index)
                ctx.loss(model(part.x), part).backward()


@row("7", "`no_sync`, the last backward outside", BOTH, after=_one_reduction)
def no_sync(model: nn.Module, batch: Batch, ctx: Context) -> None:
    with ctx.no_sync():
        for index in range(3):
            part = ctx.micro(index)
            ctx.loss(model(part.x), part).backward()
    ctx.loss(model(batch.x), batch).backward()


@row("7", "`no_sync`, a kept graph whose second backward is outside")
def no_sync_retained(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    with ctx.no_sync():
        ctx.loss(out, batch).backward(retain_graph=True)
    ctx.aux(out).backward()


@row("8", "GradCache: loss on representations, per-chunk re-forward and `rep.backward(g)`", BOTH)
def grad_cache(model: nn.Module, batch: Batch, ctx: Context) -> None:
    chunks = [ctx.micro(index).x for index in range(3)]
    with torch.no_grad():
        reps = [model.walk(model.embed(x)) for x in chunks]
    reps = [rep.requires_grad_() for rep in reps]
    joined = torch.cat(reps).flatten(1)
    (joined @ joined.T / 64).logsumexp(dim=-1).mean().backward()
    for x, rep in zip(chunks, reps, strict=True):
        model.walk(model.embed(x)).backward(rep.grad)


class TiledLoss(torch.autograd.Function):
    """Head and loss tile by tile; the head's gradients are made in forward."""

    @staticmethod
    def forward(fn: Any, hidden: Tensor, model: nn.Module, targets: Tensor) -> Tensor:
        grads, total = [], torch.zeros(())
        for tile, y in zip(hidden.tensor_split(2), targets.tensor_split(2), strict=True):
            with torch.enable_grad():
                leaf = tile.detach().requires_grad_()
                logits = model.read(leaf)
                loss = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum") / targets.numel()
                torch.autograd.backward(loss)
            grads.append(leaf.grad)
            total += loss.detach()
        fn.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return fn.saved_tensors[0] * grad, None, None


@row("9", "`Function.forward` calls `backward()` inside (tiled losses), 2 tiles", ("mlp", "gpt", "tied-gpt"))
def tiled_loss(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = TiledLoss.apply(model.walk(model.embed(batch.x)), model, batch.y)
    ctx.record("loss", loss)
    loss.backward()


class SideLoss(torch.autograd.Function):
    """Passes its input on, and trains a loss of its own on it while forward is still under way."""

    @staticmethod
    def forward(fn: Any, hidden: Tensor, model: nn.Module) -> Tensor:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            torch.autograd.backward(model.read(model.blocks[1](leaf)).pow(2).mean())
        fn.save_for_backward(leaf.grad)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + fn.saved_tensors[0], None


@row("9b", "the inner backward runs in the middle of the outer forward", BOTH)
def side_loss(model: nn.Module, batch: Batch, ctx: Context) -> None:
    hidden = SideLoss.apply(model.blocks[0](model.embed(batch.x)), model)
    ctx.loss(model.read(model.walk(hidden, (1, 2))), batch).backward()


class Rerun(torch.autograd.Function):
    """Forward without a graph; backward runs forward again and a backward of its own."""

    @staticmethod
    def forward(fn: Any, hidden: Tensor, module: nn.Module) -> Tensor:
        fn.module = module
        fn.save_for_backward(hidden)
        return module(hidden)

    @staticmethod
    def backward(fn: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            leaf = fn.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(fn.module(leaf), grad)
        return leaf.grad, None


@row("9c", "`Function.backward` re-runs forward and backward", ("mlp", "gpt", "conv"))
def rerun(model: nn.Module, batch: Batch, ctx: Context) -> None:
    hidden = model.embed(batch.x)
    for block in model.blocks:
        hidden = Rerun.apply(hidden, block)
    ctx.loss(model.read(hidden), batch).backward()


@row("13", "activation checkpoint, reentrant and not, inside and around a unit", REMAT, variants=True)
def remat(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


@row("13b", "same, with two backwards", REMAT)
def remat_twice(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.aux(out).backward()


def _differentiable(batch: Batch) -> Tensor:
    """The batch as an input that wants a gradient; tokens become fixed embeddings."""
    if batch.x.is_floating_point():
        return batch.x.clone().requires_grad_()
    table = torch.randn(11, 12, generator=torch.Generator().manual_seed(77))
    return table[batch.x].requires_grad_()


@row("14", "gradient penalty: `create_graph=True` on inputs", ("mlp", "gpt", "conv"))
def penalise_inputs(model: nn.Module, batch: Batch, ctx: Context) -> None:
    x = _differentiable(batch)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel cannot be differentiated twice
        loss = ctx.loss(model(x), batch)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.pow(2).sum()).backward()


def _penalty_reference(models: Sequence[nn.Module], batches: Sequence[Batch], ctxs: Sequence[Context]) -> None:
    """The gradient of a parameter is the mean G over the ranks, and each rank penalises all of it. Rank r thus adds
    H_r (2 G), and these are averaged like any gradient. All factors besides G and H are powers of two, so the result is
    exact."""
    grads = []
    for model, batch, ctx in zip(models, batches, ctxs, strict=True):
        loss = ctx.loss(model(batch.x), batch)
        grads.append(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
    scale = 2 / len(models)
    weights = [scale * sum(grad.detach() for grad in ranks) for ranks in zip(*grads, strict=True)]
    for rank_grads in grads:
        torch.autograd.backward(rank_grads, weights)


@row("14", "gradient penalty: `create_graph=True` on parameters", together=_penalty_reference)
def penalise_parameters(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


@row("14b", "`torch.autograd.grad(loss, params)`", ("mlp", "gpt", "tied-gpt"))
def grad_of_parameters(model: nn.Module, batch: Batch, ctx: Context) -> None:
    names, leaves = zip(*model.named_parameters(), strict=True)
    loss = ctx.loss(model(batch.x), batch)
    ctx.assign_grads(dict(zip(names, torch.autograd.grad(loss, leaves), strict=True)))


@row("14b", "`torch.autograd.grad` of a unit that took no part, `allow_unused=True`")
def grad_of_unused(model: nn.Module, batch: Batch, ctx: Context) -> None:
    names, leaves = zip(*model.named_parameters(), strict=True)
    loss = ctx.loss(model(batch.x, (0, 2)), batch)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    ctx.assign_grads(dict(zip(names, grads, strict=True)))


@row("14c", "`backward(inputs=some params)`", BOTH)
def backward_of_some(model: nn.Module, batch: Batch, ctx: Context) -> None:
    some = [p for name, p in model.named_parameters() if "up" in name or "norm" in name]
    ctx.loss(model(batch.x), batch).backward(inputs=some)


@row("14c", "`backward(inputs=...)` twice, other parameters the second time")
def backward_of_others(model: nn.Module, batch: Batch, ctx: Context) -> None:
    named = list(model.named_parameters())
    loss = ctx.loss(model(batch.x), batch)
    loss.backward(inputs=[p for name, p in named if "blocks.1" in name], retain_graph=True)
    loss.backward(inputs=[p for name, p in named if "blocks.1" not in name])


@row("14d", "FGSM: `autograd.grad(loss, x)`, then a new forward and backward", ("mlp", "gpt", "conv"))
def fast_gradient_sign(model: nn.Module, batch: Batch, ctx: Context) -> None:
    x = _differentiable(batch)
    (grad,) = torch.autograd.grad(ctx.loss(model(x), batch), x)
    ctx.record("input gradient", grad)
    ctx.loss(model((x + 0.125 * grad.sign()).detach()), batch).backward()


@row("17", "two forwards and one backward", BOTH)
def sum_of_forwards(model: nn.Module, batch: Batch, ctx: Context) -> None:
    part = ctx.micro(0)
    (ctx.loss(model(batch.x), batch) + ctx.loss(model(part.x), part)).backward()


@row("17", "a module called twice", BOTH)
def called_twice(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x, (0, 0, 1, 2, 1)), batch).backward()


def _fail(*args: Any) -> None:
    raise ValueError("raised on purpose")


@row("18", "exception in backward, then a clean step", ("mlp", "gpt", "conv"))
def backward_raises(model: nn.Module, batch: Batch, ctx: Context) -> None:
    handle = model.blocks[1].register_full_backward_hook(_fail)
    loss = ctx.loss(model(batch.x), batch)
    with ctx.raises(ValueError):
        loss.backward()
    handle.remove()
    ctx.zero_grad()
    ctx.loss(model(batch.x), batch).backward()


@row("18b", "exception in forward, then a clean step", ("mlp", "gpt", "conv"))
def forward_raises(model: nn.Module, batch: Batch, ctx: Context) -> None:
    handle = model.blocks[1].register_forward_pre_hook(_fail)
    with ctx.raises(ValueError):
        model(batch.x)
    handle.remove()
    ctx.loss(model(batch.x), batch).backward()


@row("27", "`zero_grad()` in the middle of accumulation drops what came before", BOTH)
def zero_in_the_middle(model: nn.Module, batch: Batch, ctx: Context) -> None:
    for index in range(4):
        if index == 2:
            ctx.zero_grad(set_to_none=ctx.step % 2 == 0)
        part = ctx.micro(index)
        ctx.loss(model(part.x), part).backward()


@row("27", "steps without `zero_grad()` between them add up", keep_grads=True)
def never_zeroed(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


@row("28", "a second backward without `retain_graph` raises, as in torch", BOTH)
def freed_graph(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    loss.backward()
    with ctx.raises(RuntimeError):
        loss.backward()
    ctx.zero_grad()
    ctx.loss(model(batch.x), batch).backward()


@row("28", "optimizer.step() then backward over the old graph raises, as in torch", BOTH)
def stale_graph(model: nn.Module, batch: Batch, ctx: Context) -> None:
    old = ctx.memo.pop("loss", None)
    if old is not None:
        with ctx.raises(RuntimeError):
            old.backward()
        ctx.zero_grad()
    loss = ctx.loss(model(batch.x), batch)
    loss.backward(retain_graph=True)
    ctx.memo["loss"] = loss
