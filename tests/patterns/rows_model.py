"""Rows about models, parameters and gradients: tied, frozen, odd, hooked, edited, wrapped, adversarial."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.patterns.context import Context
from tests.patterns.models import FEATURES, Batch, add_lora
from tests.patterns.registry import Case, Phase, add, row

BOTH = ("mlp", "gpt")


def _plain(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


@row("10", "weight tying inside a unit / across units", ("twin-mlp", "cross-mlp", "tied-gpt"), variants=True)
def tied(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("10", "tied weights with two backwards over one graph", ("twin-mlp", "cross-mlp", "tied-gpt"))
def tied_twice(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.aux(out).backward()


def _set_frozen(model: nn.Module, frozen: bool) -> None:
    """A whole unit, and one parameter of each other unit and of the root."""
    for name, leaf in model.named_parameters():
        if name.startswith("blocks.0") or "up.weight" in name or name == "head.weight":
            leaf.requires_grad_(not frozen)


def _freeze(model: nn.Module, ctx: Context) -> None:
    _set_frozen(model, True)


@row("12", "frozen", BOTH, setup=_freeze)
def frozen(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("12", "frozen mid-run", BOTH)
def frozen_mid_run(model: nn.Module, batch: Batch, ctx: Context) -> None:
    if ctx.step == 1:
        _set_frozen(model, True)
    _plain(model, batch, ctx)


@row("12", "unfrozen mid-run", BOTH, setup=_freeze)
def unfrozen_mid_run(model: nn.Module, batch: Batch, ctx: Context) -> None:
    if ctx.step == 1:
        _set_frozen(model, False)
    _plain(model, batch, ctx)


@row("12", "frozen between two backwards")
def frozen_between(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _set_frozen(model, False)
    _plain(model, batch, ctx)
    _set_frozen(model, True)
    part = ctx.micro(0)
    _plain(model, part, ctx)


@row("16", "a weight used outside any forward", BOTH)
def weight_in_loss(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x), batch)
    (loss + model.blocks[1].up.weight.pow(2).sum() / 8 + model.head.weight.abs().mean()).backward()


@row("16", "a weight of a unit that does not run, used in the loss only")
def weight_of_idle_unit(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = ctx.loss(model(batch.x, (0, 2)), batch)
    (loss + model.blocks[1].down.weight.pow(2).sum()).backward()


@row("16b", "same, used before its block runs", BOTH)
def weight_before_block(model: nn.Module, batch: Batch, ctx: Context) -> None:
    early = F.linear(model.blocks[2].up.weight, model.blocks[1].up.weight).tanh().mean()
    (ctx.loss(model(batch.x), batch) * (1 + early)).backward()


@row("16b", "same, feeding the input")
def weight_feeds_input(model: nn.Module, batch: Batch, ctx: Context) -> None:
    x = batch.x + model.blocks[1].down.bias[:FEATURES] + model.blocks[2].up.weight.mean(dim=0)[:FEATURES]
    ctx.loss(model(x), batch).backward()


@row("20", "a parameter larger than a bucket", ("wide-mlp",))
def large_parameter(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("21", "zero-sized parameter; 0-dim parameter", ("odd-shapes", "scalar"), variants=True)
def odd_parameters(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _double_gradients(model: nn.Module, ctx: Context) -> None:
    for leaf in model.parameters():
        leaf.register_hook(lambda grad: grad * 2)


@row("24", "user hooks: `p.register_hook`", BOTH, setup=_double_gradients)
def tensor_hooks(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("24", "user hooks: `p.register_hook`, some parameters unused", setup=_double_gradients)
def tensor_hooks_unused(model: nn.Module, batch: Batch, ctx: Context) -> None:
    """Torch does not call the hook of a parameter without a gradient."""
    ctx.aux(model.blocks[0].norm_only(model.embed(batch.x))).backward()


@row("24", "user hooks: `p.register_hook` in a window", setup=_double_gradients)
def tensor_hooks_window(model: nn.Module, batch: Batch, ctx: Context) -> None:
    with ctx.coalesce():
        _plain(model, batch, ctx)
        _plain(model, ctx.micro(0), ctx)


def _halve(leaf: nn.Parameter) -> None:
    leaf.grad.mul_(0.5)


@row("24", "user hooks: `register_post_accumulate_grad_hook`, two backwards", BOTH, leaf_hook=_halve)
def accumulate_hooks(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)
    _plain(model, ctx.micro(0), ctx)


@torch.no_grad()
def _step_in_hook(leaf: nn.Parameter) -> None:
    leaf.add_(leaf.grad, alpha=-(2**-4))
    leaf.grad = None


@row("24", "user hooks: the optimizer step inside backward", leaf_hook=_step_in_hook, optimizer_steps=False)
def step_in_hook(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _hook_modules(model: nn.Module, ctx: Context) -> None:
    counts = ctx.memo.setdefault("counts", dict.fromkeys(("pre", "post", "backward pre", "backward"), 0))

    def count(name: str) -> None:
        counts[name] += 1

    def pre(module: nn.Module, args: Any) -> Any:
        count("pre")
        return (args[0] * 2, *args[1:])

    def post(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        count("post")
        return out * 0.5

    def backward_pre(module: nn.Module, grads: Any) -> Any:
        count("backward pre")
        return (grads[0] * 2,)

    def backward(module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
        count("backward")
        return (grads_in[0] * 0.5,)

    for module in (model.blocks[1], model.blocks[2].up, model.head):
        module.register_forward_pre_hook(pre)
        module.register_forward_hook(post)
        module.register_full_backward_pre_hook(backward_pre)
        module.register_full_backward_hook(backward)


@row("24", "user hooks: module hooks of all four kinds", BOTH, setup=_hook_modules)
def module_hooks(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)
    ctx.record("calls", dict(ctx.memo["counts"]))


def edit_grads(model: nn.Module, ctx: Context) -> None:
    for index, leaf in enumerate(model.parameters()):
        if index % 2:
            leaf.grad.mul_(0.5)
        else:
            leaf.grad = leaf.grad.sign() * 2**-6


def clip_values(model: nn.Module, ctx: Context) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 2**-6)


def _clip_norm(model: nn.Module, ctx: Context) -> None:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    ctx.record("norm", norm)


@row("24b", "user edits `p.grad`, in place and by assignment", BOTH, edit=edit_grads)
def edited_grads(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("24b", "`torch.nn.utils.clip_grad_value_`", BOTH, edit=clip_values)
def clipped_values(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# Tolerance: the norm of a parameter in pieces adds its squares in another order than the norm of the whole.
@row("24b", "`torch.nn.utils.clip_grad_norm_`", BOTH, edit=_clip_norm, rtol=2e-6)
def clipped_norm(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@torch.no_grad()
def _clamp_leaves(model: nn.Module, ctx: Context) -> None:
    for leaf in model.parameters():
        leaf.clamp_(-0.25, 0.25)


def _clamp_data(model: nn.Module, ctx: Context) -> None:
    for leaf in model.parameters():
        leaf.data.clamp_(-0.25, 0.25)


@torch.no_grad()
def _edit_full(model: nn.Module, ctx: Context) -> None:
    with ctx.full_params(model, write=True):
        model.blocks[1].up.weight.mul_(0.5)
        model.head.weight[0].fill_(0.125)


@row("24c", "user edits weights in place after the step (`clamp_`)", BOTH, after=_clamp_leaves)
def edited_leaves(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("24c", "same, through `.data`", BOTH, after=_clamp_data)
def edited_data(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row("24c", "same, in true shapes through `full_params(write=True)`", BOTH, after=_edit_full)
def edited_full(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _critic_phase(model: nn.Module, batch: Batch, ctx: Context) -> None:
    fake = ctx.memo["fake"] = model.generator(torch.randn_like(batch.x))
    loss = F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(batch.x)).mean()
    ctx.record("critic", loss)
    loss.backward()


def _generator_phase(model: nn.Module, batch: Batch, ctx: Context) -> None:
    loss = F.softplus(-model.critic(ctx.memo.pop("fake"))).mean()
    ctx.record("generator", loss)
    loss.backward()


def _wasserstein_phase(model: nn.Module, batch: Batch, ctx: Context) -> None:
    fake = ctx.memo["fake"] = model.generator(torch.randn_like(batch.x))
    mixed = torch.lerp(batch.x, fake.detach(), torch.rand(len(fake), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).pow(2).mean()
    loss = model.critic(fake.detach()).mean() - model.critic(batch.x).mean() + 0.5 * penalty
    ctx.record("critic", loss)
    (loss / 8).backward()


for _key, _title, _first in (
    ("25", "GAN: two sharded models, shared forward, alternating steps", _critic_phase),
    ("25b", "WGAN-GP", _wasserstein_phase),
):
    _phases = (Phase(_first, "critic"), Phase(_generator_phase, "generator"))
    add(Case(_key, _title, "gan", _phases, sharded=("generator", "critic")))


@row("26", "outputs in a dataclass or an opaque object", ("dataclass", "opaque"), variants=True)
def structured_output(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    ctx.loss(out, batch).backward(retain_graph=True)
    ctx.aux(out).backward()


@row("26", "an output modified in place", ("mlp", "gpt", "conv"))
def output_edited(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = model(batch.x)
    out.mul_(2)
    ctx.loss(out, batch).backward()


@row("29", "`functional_call` with the model's own parameters", BOTH)
def functional_own(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = torch.func.functional_call(model, dict(model.named_parameters()), (batch.x,))
    ctx.loss(out, batch).backward()


@row("29", "`functional_call` with some other weights", BOTH)
def functional_other(model: nn.Module, batch: Batch, ctx: Context) -> None:
    names = ("head.weight", "blocks.1.up.weight")
    state = ctx.full_state()
    other = {name: (state[name] * 0.5).requires_grad_() for name in names}
    ctx.loss(torch.func.functional_call(model, other, (batch.x,)), batch).backward()
    for name in names:
        ctx.record(name, other[name].grad)


@row("29", "`torch.func.grad` of all weights, per sample with `vmap`")
def functional_per_sample(model: nn.Module, batch: Batch, ctx: Context) -> None:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(model, params, (x[None],))
        return F.cross_entropy(out, y[None])

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(ctx.full_state(), *batch)
    for name, grad in per_sample.items():
        ctx.record(name, grad)
    _plain(model, batch, ctx)


@row("29", "`torch.func.grad` of the input through the model")
def functional_input(model: nn.Module, batch: Batch, ctx: Context) -> None:
    grad = torch.func.grad(lambda x: model(x).pow(2).mean())(batch.x)
    ctx.record("input gradient", grad)
    ctx.loss(model(batch.x + grad), batch).backward()


@row("29", "`torch.func.grad` inside a forward")
def functional_inside(model: nn.Module, batch: Batch, ctx: Context) -> None:
    def pre(module: nn.Module, args: Any) -> Any:
        return (args[0] + torch.func.grad(lambda h: h.pow(2).sum())(args[0].detach()),)

    handle = model.blocks[1].register_forward_pre_hook(pre)
    loss = ctx.loss(model(batch.x), batch)
    handle.remove()
    loss.backward()


@row("29", "`vmap` over the model, then backward")
def vmap_forward(model: nn.Module, batch: Batch, ctx: Context) -> None:
    out = torch.func.vmap(lambda x: model(x[None])[0])(batch.x)
    ctx.loss(out, batch).backward()


@row("30", "LoRA wrapping before sharding, adapters only trained", ("lora-mlp",))
def lora_before(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _wrap(model: nn.Module, ctx: Context) -> None:
    add_lora(model)


@row("30", "LoRA wrapping after sharding, adapters only trained", setup=_wrap)
def lora_after(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)
