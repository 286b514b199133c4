"""Rows about leaves: code that reads and writes `model.parameters()` and their gradients as if nothing were sharded.

Factors are powers of two and reductions are largest elements, counts and signs: exact in any order. Where a norm or a
sum of fractions is part of the pattern, the row says so and has a tolerance.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

import retrograde as rg
from tests.patterns.context import Context
from tests.patterns.models import Batch
from tests.patterns.registry import row

BOTH = ("mlp", "gpt")
SHAPES = ("mlp", "gpt", "conv", "odd-shapes", "scalar")
RATE = 2**-4


def _plain(model: nn.Module, batch: Batch, ctx: Context) -> None:
    ctx.loss(model(batch.x), batch).backward()


def _params(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
    """Those with a gradient, with it and their state."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param, param.grad, optimizer.state[param]


# ---- shapes and counts
def _count(model: nn.Module, ctx: Context) -> None:
    params = list(model.parameters())
    ctx.record("elements", sum(p.numel() for p in params))
    ctx.record("bytes", sum(p.nbytes for p in params) + sum(p.numel() * p.element_size() for p in params))
    for p in params:
        for tensor in (p, p.data, p.grad, p.grad * 2, p.grad > 0):
            said = [list(tensor.shape), list(tensor.size()), tensor.dim(), tensor.ndim, tensor.nelement()]
            ctx.record("shape", [*said, len(tensor) if tensor.dim() else None, tensor.stride()])


def _decayed_by_dimensions(params: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": [p for p in params if p.dim() >= 2 and p.shape[0] > 1], "weight_decay": 2**-3},
        {"params": [p for p in params if not (p.dim() >= 2 and p.shape[0] > 1)], "weight_decay": 0.0},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=RATE)


@row("31", "counts and shapes, weight decay by `p.dim()`", SHAPES, edit=_count, optimizer=_decayed_by_dimensions)
def counted(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- numbers of reductions
def _clip_by_hand(model: nn.Module, ctx: Context) -> None:
    params = [p for p in model.parameters() if p.numel() > 0]
    largest = max(p.grad.abs().max().item() for p in params)
    ctx.record("largest", [largest, *(float(p.detach().amin()) for p in params)])
    ctx.record("signs", [int(p.grad.sign().sum()) for p in params])
    ctx.record("zeros", sum((p.grad == 0).sum().item() for p in params))
    if largest > 2**-6:
        for p in params:
            p.grad.mul_(2.0 ** -math.ceil(math.log2(largest * 2**6)))


@row("31b", "`.item()` of reductions: gradients clipped by hand", SHAPES, edit=_clip_by_hand)
def clipped_by_hand(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _skip_if_not_finite(model: nn.Module, ctx: Context) -> None:
    if ctx.step == 1:
        list(model.parameters())[-1].grad.view(-1)[-1:] = torch.inf  # an element that one rank has
    for p in model.parameters():
        finite = p.grad.isfinite().all()
        ctx.record("finite", [bool(finite), not torch.isinf(p.grad).any(), p.grad.isnan().any().item()])
    if not all(torch.isfinite(p.grad).all() for p in model.parameters()):
        for p in model.parameters():
            p.grad = None


@row("31c", "`bool()` of reductions: a step is skipped if a gradient is not finite", BOTH, edit=_skip_if_not_finite)
def skipped_if_not_finite(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- optimizers that look at more than one element
def _adafactor(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adafactor(params, lr=RATE)


# Tolerance: it scales by norms of parameters and updates, which are sums of pieces here; 3 steps of it. Not the GPT:
# its keys' biases have gradients of nothing but rounding errors, which Adafactor makes large.
@row("31d", "Adafactor", ("mlp", "conv"), optimizer=_adafactor, rtol=1e-5)
def adafactor(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _muon(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=RATE, momentum=2**-1, weight_decay=2**-3)


# Exact although it divides by a norm: the norm is rounded to bf16, which hides the order of a sum in floats.
@row("31e", "Muon for matrices", BOTH, optimizer=_muon)
def muon(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# Exact: owners compute with plain tensors.
@row("31r", "Muon for matrices, each updated by the rank that holds it whole", BOTH, optimizer=_muon, whole="matrices")
def muon_by_owners(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@row(
    "31s", "Adafactor, each parameter updated by the rank that holds it whole", BOTH, optimizer=_adafactor, whole="all"
)
def adafactor_by_owners(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


class Lamb(Optimizer):
    """The update of Adam, scaled by the norms of the parameter and of the update."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p, grad, state in _params(self):
            if not state:
                state.update(first=torch.zeros_like(p), second=torch.zeros_like(p))
            state["first"].lerp_(grad, 2**-1)
            state["second"].mul_(0.75).addcmul_(grad, grad, value=0.25)
            update = state["first"] / state["second"].sqrt().add_(1e-3) + 2**-3 * p
            weight, size = p.norm(), update.norm()
            trust = torch.where((weight > 0) & (size > 0), weight / size, torch.ones_like(weight))
            p.sub_(update * trust * 2**-4)


# Tolerance: norms, as above.
@row("31f", "LAMB, written by hand", ("mlp", "gpt", "conv"), optimizer=Lamb, rtol=1e-5)
def lamb(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _lbfgs(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.LBFGS(params, lr=2**-3, max_iter=1, history_size=2)


def _with_these_gradients(optimizer: Optimizer) -> None:
    """One iteration asks once for gradients, and they are there."""
    optimizer.step(lambda: torch.ones(()))


@row("31g", "LBFGS, an iteration a step", BOTH, optimizer=_lbfgs, take_step=_with_these_gradients, steps=4)
def lbfgs(model: nn.Module, batch: Batch, ctx: Context) -> None:
    """All of its sums are over a vector that it makes of whole gradients: in torch's order."""
    _plain(model, batch, ctx)


def _rprop(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Rprop(params, lr=2**-6, etas=(0.5, 2.0), step_sizes=(2**-10, 2**-3))


@row("31h", "Rprop, made before `shard()`", BOTH, optimizer=_rprop, optimizer_first=True)
def early_rprop(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


class RowScaled(Optimizer):
    """Each row of a matrix by its own largest element so far: nobody knows this one."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p, grad, state in _params(self):
            if p.dim() < 2:
                p.sub_(grad, alpha=RATE)
                continue
            largest = grad.abs().amax(dim=-1, keepdim=True)
            state["largest"] = torch.maximum(state.get("largest", largest), largest)
            p.sub_(RATE * grad / (state["largest"] + 2**-10))


@row("31h", "an optimizer that nobody knows, made before `shard()`", BOTH, optimizer=RowScaled, optimizer_first=True)
def unknown_optimizer(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


@rg.elementwise
class Lion(Optimizer):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 2**-6})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p, grad, state in _params(self):
            if not state:
                state["average"] = torch.zeros_like(p)
            p.mul_(1 - 2**-8).sub_(state["average"].lerp(grad, 0.5).sign_(), alpha=2**-6)
            state["average"].lerp_(grad, 0.25)


@row("31i", "an optimizer of the user's, declared elementwise", SHAPES, optimizer=Lion)
def declared_elementwise(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- parameters in graphs
@row("31j", "penalties over `model.parameters()`", BOTH)
def penalties(model: nn.Module, batch: Batch, ctx: Context) -> None:
    """Each parameter in one of them: torch adds three gradients in an order of its own."""
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda p: p.pow(2).sum(),
        lambda p: p.abs().mean(),
        lambda p: p.norm(),
        lambda p: (p - p.detach().mul(0.5)).square().sum(),
        lambda p: torch.linalg.vector_norm(p, dim=-1).sum(),
    ]
    terms = [kinds[index % len(kinds)](p) for index, p in enumerate(model.parameters())]
    penalty = torch.stack(terms).sum() * 2**-4
    ctx.record("penalty", penalty)
    (ctx.loss(model(batch.x), batch) + penalty).backward()


# ---- copies and averages
def _copy_parameters(model: nn.Module, ctx: Context) -> None:
    ctx.memo["average"] = {name: copy.deepcopy(p) for name, p in model.named_parameters()}


@torch.no_grad()
def _average_copies(model: nn.Module, ctx: Context) -> None:
    """And a look at what the average would predict, alike on all ranks."""
    average, batch = ctx.memo["average"], ctx.spec.batch(0, ctx.step)
    for name, p in model.named_parameters():
        assert isinstance(average[name], nn.Parameter) and average[name].requires_grad
        average[name].mul_(0.5).add_(p, alpha=0.5)
        ctx.record(name, average[name])
    before = {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.copy_(average[name])
    ctx.loss(model(batch.x), batch)
    for name, p in model.named_parameters():
        p.data.copy_(before[name])


@row("31k", "an average of `deepcopy(p)`, swapped in and out", BOTH, setup=_copy_parameters, after=_average_copies)
def averaged_copies(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


def _start_lists(model: nn.Module, ctx: Context) -> None:
    params = list(model.parameters())
    ctx.memo["sharded"] = [p.detach().clone() for p in params]
    ctx.memo["plain"] = [torch.zeros(p.shape) for p in params]


@torch.no_grad()
def _average_lists(model: nn.Module, ctx: Context) -> None:
    params = list(model.parameters())
    for name in ("sharded", "plain"):
        torch._foreach_lerp_(ctx.memo[name], params, 0.5)
        torch._foreach_sub_(ctx.memo[name], [p.grad for p in params], alpha=0.25)
        for average in ctx.memo[name]:
            ctx.record(name, average)
    mixed = torch._foreach_add(ctx.memo["plain"], ctx.memo["sharded"], alpha=0.5)
    torch._foreach_mul_(params, 0.5)
    torch._foreach_add_(params, mixed, alpha=0.25)


@row(
    "31l",
    "averages by `torch._foreach_lerp_`, of lists sharded and plain",
    SHAPES,
    setup=_start_lists,
    after=_average_lists,
)
def averaged_lists(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- vectors
def _through_vectors(model: nn.Module, ctx: Context) -> None:
    grads = parameters_to_vector([p.grad for p in model.parameters()])
    weights = parameters_to_vector(model.parameters()).detach()
    ctx.record("gradients", grads)
    ctx.record("weights", weights)
    vector_to_parameters(torch.where(grads > 0, weights * 0.5, weights), model.parameters())
    vector_to_parameters(weights.sign() * 2**-6, [p.grad for p in model.parameters()][::2])


@row("31m", "`parameters_to_vector` and back, of weights and gradients", ("mlp", "gpt", "conv"), edit=_through_vectors)
def vectors(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- filled anew
INITS: list[Callable[[Tensor], Tensor]] = [
    nn.init.xavier_uniform_,
    nn.init.orthogonal_,
    lambda p: nn.init.kaiming_normal_(p, nonlinearity="relu"),
    lambda p: nn.init.trunc_normal_(p, std=0.25),
    lambda p: nn.init.sparse_(p, 0.5) if p.dim() == 2 else nn.init.dirac_(p),
    lambda p: nn.init.eye_(p) if p.dim() == 2 else nn.init.xavier_normal_(p),
]


def _fill(model: nn.Module, ctx: Context) -> None:
    torch.manual_seed(5)
    for index, p in enumerate(model.parameters()):
        if p.dim() > 1 and p.numel() > 0:
            INITS[index % len(INITS)](p)
        else:
            nn.init.uniform_(p, -0.5, 0.5) if index % 2 else nn.init.constant_(p, 0.25)


@row("31n", "`nn.init` over the parameters, after `shard()`", ("mlp", "gpt", "conv", "odd-shapes"), setup=_fill)
def filled_anew(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- plain tensors beside them
def _make_buffers(model: nn.Module, ctx: Context) -> None:
    ctx.memo["buffers"] = [torch.zeros(p.shape) for p in model.parameters()]


@torch.no_grad()
def _momentum_by_hand(model: nn.Module, ctx: Context) -> None:
    for buffer, p in zip(ctx.memo["buffers"], model.parameters(), strict=True):
        total = torch.zeros(p.shape).add_(p.grad)
        buffer.mul_(0.5).add_(p.grad, alpha=0.5)
        p.sub_((buffer + total) * RATE)
        p.grad.copy_(torch.where(buffer > 0, p.grad, total))
        p.addcdiv_(p.grad.sign(), torch.full(p.shape, 2.0), value=2**-6)
        ctx.record("buffer", buffer)


@row(
    "31o",
    "plain buffers in the whole's shape: momentum by hand",
    SHAPES,
    setup=_make_buffers,
    edit=_momentum_by_hand,
    optimizer_steps=False,
)
def plain_buffers(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- rows and masks
def _edit_rows(model: nn.Module, ctx: Context) -> None:
    for index, p in enumerate(model.parameters()):
        grad = p.grad
        grad[0] = 0
        grad[grad.abs() < 2**-7] = 2**-7
        grad[-1:].sum()
        if grad.dim() < 2:
            even = torch.arange(len(grad)) % 2 == 0
            grad[even] = grad[even] * 0.5
            continue
        grad[:, 1] = grad[:, 1] * 2
        grad[1:, ::2] = grad[1:, ::2] - 0.125
        grad.index_fill_(0, torch.tensor([index % len(grad)]), 2**-5)
        grad.masked_fill_(torch.ones(grad.shape).triu_().bool(), -(2**-5))
        grad *= grad.new_ones(grad.shape[-1:]).mul_(0.5)
        p.grad = torch.where(grad > 0, grad, grad * 0.5)


@row("31p", "rows and masks of gradients, edited before the step", BOTH, edit=_edit_rows)
def rows_and_masks(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)


# ---- checkpoints
def _through_a_checkpoint(model: nn.Module, ctx: Context) -> None:
    """Saved, lost, and loaded again, with the optimizer's state. On plain torch nothing has to be lost."""
    engine = getattr(model, "_retrograde_engine", None)
    if engine is None:
        return
    (optimizer,) = ctx.optimizers
    folder = [tempfile.mkdtemp() if ctx.rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    dcp.save({"model": engine.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder[0])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
            optimizer.state[p]["momentum_buffer"].fill_(torch.nan)
    state = {"model": engine.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    engine.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    dist.barrier()
    if ctx.rank == 0:
        shutil.rmtree(folder[0])


@row(
    "31q",
    "the model and the optimizer through `dcp.save` and `dcp.load` after each step",
    BOTH,
    after=_through_a_checkpoint,
)
def through_a_checkpoint(model: nn.Module, batch: Batch, ctx: Context) -> None:
    _plain(model, batch, ctx)
