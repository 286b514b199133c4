"""Rows in which ranks do not do the same."""

from __future__ import annotations

from torch import nn

from tests.patterns.context import Context
from tests.patterns.models import Batch
from tests.patterns.registry import row
from tests.patterns.rows_model import clip_values, edit_grads

BOTH = ("mlp", "gpt")


@row("11", "a unit used in some steps only", BOTH)
def unit_in_some_steps(model: nn.Module, batch: Batch, ctx: Context) -> None:
    path = (0, 1, 2) if ctx.step % 2 == 0 else (0, 2)
    ctx.loss(model(batch.x, path), batch).backward()


@row("11", "a unit used in no step")
def unit_never_used(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x, (0, 2)), batch).backward()


@row("11", "a parameter that goes unused in a unit that is used", ("mlp", "gpt", "odd-shapes"))
def parameter_unused(model: nn.Module, batch: Batch, ctx: Context) -> None:
    """The head, in some steps; a layer inside a block, always."""
    hidden = model.blocks[0](model.embed(batch.x)) + model.blocks[1].norm_only(model.embed(batch.x))
    ctx.aux(hidden if ctx.step % 2 else model.read(hidden)).backward()


@row("11b", "a parameter used on rank 0 only, in a unit that all use", ("mlp", "gpt"))
def parameter_on_first_rank(model: nn.Module, batch: Batch, ctx: Context) -> None:
    hidden = model.embed(batch.x)
    used = model.blocks[0](hidden) if ctx.rank == 0 else model.blocks[0].norm_only(hidden)
    ctx.aux(used).backward()


@row("11b", "a unit used on rank 0 only", BOTH)
def unit_on_first_rank(model: nn.Module, batch: Batch, ctx: Context) -> None:
    path = (0, 1, 2) if ctx.rank == 0 else (0, 2)
    ctx.loss(model(batch.x, path), batch).backward()


@row("11b", "a unit used on the last rank only, in every second step")
def unit_on_last_rank(model: nn.Module, batch: Batch, ctx: Context) -> None:
    path = (0, 1, 2) if ctx.rank == ctx.world - 1 and ctx.step % 2 == 0 else (0, 2)
    ctx.loss(model(batch.x, path), batch).backward()


@row("11b", "a unit used on rank 0 only, kept for two backwards")
def unit_on_first_rank_retained(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x, (0, 1, 2) if ctx.rank == 0 else (0, 2))
    ctx.aux(out).backward(retain_graph=True)
    ctx.loss(out, batch).backward()


@row("11c", "ranks use different units of the same shape", BOTH)
def different_units(model: nn.Module, batch: Batch, ctx: Context) -> None:
    path = (0, 1) if ctx.rank % 2 == 0 else (0, 2)
    ctx.loss(model(batch.x, path), batch).backward()


@row("11c", "ranks use different units, others in every step", steps=4)
def changing_units(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x, ((ctx.rank + ctx.step) % 3,)), batch).backward()


@row("11d", "same units, other order per rank", BOTH)
def other_order(model: nn.Module, batch: Batch, ctx: Context) -> None:
    first = ctx.rank % 3
    ctx.loss(model(batch.x, (first, (first + 1) % 3, (first + 2) % 3)), batch).backward()


@row("11e", "unequal number of backwards per rank", BOTH)
def unequal_backwards(model: nn.Module, batch: Batch, ctx: Context) -> None:
    for index in range(1 + (ctx.rank + ctx.step) % 3):
        part = ctx.micro(index)
        ctx.loss(model(part.x), part).backward()


@row("11e", "same, then `clip_grad_value_`", edit=clip_values)
def unequal_backwards_then_clip(model: nn.Module, batch: Batch, ctx: Context) -> None:
    unequal_backwards(model, batch, ctx)


@row("11e", "same, then `p.grad` is edited in place and by assignment", BOTH, edit=edit_grads)
def unequal_backwards_then_edit(model: nn.Module, batch: Batch, ctx: Context) -> None:
    unequal_backwards(model, batch, ctx)


@row("11e", "same, with `zero_grad()` between some and others")
def unequal_backwards_around_zero(model: nn.Module, batch: Batch, ctx: Context) -> None:
    unequal_backwards(model, batch, ctx)
    ctx.zero_grad()
    unequal_backwards(model, batch, ctx)


@row("11e", "a rank without any backward")
def backward_on_first_rank(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    if ctx.rank == 0:
        loss.backward()


@row("11e", "a rank without forward and backward")
def work_on_first_rank(model: nn.Module, batch: Batch, ctx: Context) -> None:
    if ctx.rank == 0:
        ctx.loss(model(batch.x), batch).backward()


@row("11e", "unequal number of backwards over one kept graph")
def unequal_retained(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    for _ in range((ctx.rank + ctx.step) % 3):
        loss.backward(retain_graph=True)
    loss.backward()


# ---- replicas of a sharded model, whose ranks may differ as well
@row("11f", "HSDP, 2 replicas: two losses over one graph, two backwards", BOTH, most_replicas=2)
def replicated(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.aux(out).backward()


@row("11f", "HSDP, 2 replicas: unequal number of backwards per rank", BOTH, most_replicas=2)
def replicated_unequal_backwards(model: nn.Module, batch: Batch, ctx: Context) -> None:
    unequal_backwards(model, batch, ctx)


@row("11f", "HSDP, 2 replicas: ranks use different units, others in every step", most_replicas=2, steps=4)
def replicated_changing_units(model: nn.Module, batch: Batch, ctx: Context) -> None:
    changing_units(model, batch, ctx)
