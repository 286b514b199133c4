"""What code does with gradients between backward and step: clipping, norms, scaling, optimizers that look at all."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import RATE, Twin, close_to
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE, EACH_WORLD

INF = float("inf")


def _grads_close(twin: Twin) -> None:
    """A norm is rounded differently when it is added up in pieces, and so is what it scales."""
    grads = twin.engine.full_grads()
    for name, param in twin.plain.named_parameters():
        assert close_to(grads[name], param.grad), name


# ---- clipping
def _clip_norm(rank: int, world: int, stage: int) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    twin = Twin(rank, world, stage)
    for step, (order, limit) in enumerate(itertools.product((2.0, 1.0, 3.0, INF), (2**-6, 2.0**20))):
        twin.backward(2 * step, 2 * step + 1)
        plain = clip(twin.plain.parameters(), limit, order)
        ours = clip(twin.model.parameters(), limit, order) if step % 2 else twin.engine.clip_grad_norm_(limit, order)
        assert ours.dim() == 0 and ours.dtype == plain.dtype
        assert close_to(ours, plain) and (order != INF or torch.equal(ours, plain)), (order, ours, plain)
        _grads_close(twin)
        twin.zero_grad()
    twin.backward(0)
    some = [list(model.blocks[1].parameters()) for model in twin.both]
    assert close_to(clip(some[1], 2**-8), clip(some[0], 2**-8))
    _grads_close(twin)
    ours, plain = (torch.nn.utils.get_total_norm([p.grad for p in part]) for part in some)
    assert close_to(ours, plain), "norms after clipping"
    dict(twin.model.named_parameters())["head.bias"].grad.fill_(INF)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(twin.model.parameters(), 1.0, error_if_nonfinite=True)
    twin.close()


@EACH_WORLD
@EACH_STAGE
def test_clip_grad_norm(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_clip_norm, stage)


def _norms_without_steps(rank: int, world: int, stage: int) -> None:
    """Gradients come and go without a step (a scaler that skips): each gradient has its own norm."""
    twin = Twin(rank, world, stage)
    for step in range(12):
        twin.backward(step)
        for order in (2.0, INF):
            ours = torch.nn.utils.get_total_norm([p.grad for p in twin.model.parameters()], order)
            plain = torch.nn.utils.get_total_norm([p.grad for p in twin.plain.parameters()], order)
            assert close_to(ours, plain), (step, order, ours, plain)
        twin.zero_grad()
    twin.close()


@EACH_STAGE
def test_norms_belong_to_the_gradients_of_now(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_norms_without_steps, stage)


def _clip_value(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    for step in range(3):
        twin.backward(step)
        for model in twin.both:
            torch.nn.utils.clip_grad_value_(model.parameters(), 2**-8)
        twin.check_grads()
        twin.step()
        twin.zero_grad()
    twin.check_weights()
    twin.close()


@EACH_STAGE
def test_clip_grad_value(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_clip_value, stage)


# ---- reading
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda g: g.max(),
    "min": lambda g: g.min(),
    "amax": lambda g: g.amax(),
    "amin": lambda g: torch.amin(g),
    "any": lambda g: g.any(),
    "all": lambda g: g.all(),
    "norm(inf)": lambda g: g.norm(INF),
}
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda g: g.norm(),
    "norm(p=1)": lambda g: g.norm(p=1),
    "torch.norm": lambda g: torch.norm(g),
    "linalg.norm": lambda g: torch.linalg.vector_norm(g),
    "_foreach_norm": lambda g: torch._foreach_norm([g])[0],
    "detach().norm": lambda g: g.detach().norm(),
    "data.norm(2)": lambda g: g.data.norm(2),
    "view(-1).norm": lambda g: g.view(-1).norm(),
}
# Gradients have both signs: their sums cancel, so an error is measured against the sum of the magnitudes.
CANCELLING: dict[str, Callable[[Tensor], Tensor]] = {"sum": lambda g: g.sum(), "mean": lambda g: g.mean()}
DERIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "abs().max": lambda g: g.abs().max(),
    "isfinite().all": lambda g: torch.isfinite(g).all(),
    "isnan().any": lambda g: g.isnan().any(),
    "(g * g).sum": lambda g: (g * g).sum(),
    "pow(2).sum": lambda g: g.pow(2).sum(),
}


def _or_error(function: Callable[[Tensor], Tensor], piece: Tensor) -> Any:
    try:
        return function(piece)
    except RuntimeError as error:  # torch has no maximum of nothing
        return error


def _agree(kind: str, got: Any, expected: Tensor, scale: Tensor) -> bool:
    if isinstance(got, Exception) or kind == "exact" or not expected.is_floating_point():
        return isinstance(got, Tensor) and torch.equal(got, expected)
    return bool((got - expected).abs() <= 2e-6 * (scale if kind == "cancelling" else expected.abs()))


def _read(rank: int, world: int, stage: int, kind: str) -> None:
    twin = Twin(rank, world, stage)
    twin.backward(0)
    reads = {"exact": EXACT, "rounded": ROUNDED, "cancelling": CANCELLING, "derived": DERIVED}[kind]
    wrong = []
    for (name, plain), ours in zip(twin.plain.named_parameters(), twin.model.parameters(), strict=True):
        for read, function in reads.items():
            for what, whole, piece in (("grad", plain.grad, ours.grad), ("weight", plain.detach(), ours.detach())):
                expected, got = function(whole), _or_error(function, piece)
                scale = whole.abs().sum() / (whole.numel() if read == "mean" else 1)
                if not _agree(kind, got, expected, scale):
                    wrong.append((what, name, read, expected.item(), got))
    assert not wrong, f"rank {rank}: {len(wrong)} local answers, such as {wrong[:4]}"
    twin.close()


@pytest.mark.parametrize("kind", ("exact", "rounded", "cancelling", "derived"))
def test_reading_all_of_a_gradient_or_weight(ranks: Ranks, kind: str) -> None:
    """On a piece, with an answer that is the whole's: anything else is a silent error, other on every rank."""
    ranks(2).run(_read, 3, kind)


def _extremes(rank: int, world: int) -> None:
    """An empty piece must not have a say: here every rank but one has none of the bias."""
    model = nn.Linear(64, 1)
    rg.shard(model, 3)
    bias = dict(model.named_parameters())["bias"]
    model(torch.ones(64)).backward()
    assert bias.numel() == 1 and bias.local.numel() == (rank == world - 1)
    for value in (-INF, INF, -1.0, 3.0):
        bias.grad.fill_(value)
        assert [bias.grad.max().item(), bias.grad.min().item()] == [value, value]
        assert bias.grad.norm(INF).item() == abs(value)
        assert bool(bias.grad.any()) and bool(bias.grad.all())
    torch.distributed.barrier()


def test_empty_pieces(ranks: Ranks) -> None:
    ranks(4).run(_extremes)


def _through_the_module(rank: int, world: int, stage: int) -> None:
    """`module.weight.grad` is not None after a backward: it is the gradient, or an error says where it is."""
    twin = Twin(rank, world, stage)
    twin.backward(0)
    try:
        seen = twin.model.head.weight.grad
    except rg.UnsupportedError as error:
        assert "head.weight" in str(error)
    else:
        assert seen is not None
    twin.close()


@EACH_STAGE
def test_grad_read_through_the_module(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_through_the_module, stage)


# ---- loss scaling
def _scaler(rank: int, world: int, stage: int, where: str) -> None:
    """inf in one element of one rank's gradient: every rank skips the step and halves the scale."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in twin.both]
    for step in range(5):
        bad = step in (1, 2)
        loss = scalers[1].scale(loss_of(twin.model, batch(rank, step)))
        if bad and where == "loss" and rank == 1:
            loss = loss + INF * twin.model.head.bias[3]
        loss.backward()
        scalers[0].scale(torch.zeros(()))
        twin.plain_backward(step, loss=lambda model, ids: loss_of(model, ids) * scalers[0].get_scale())
        if bad:
            twin.plain.head.bias.grad[3] = INF
        if bad and where == "piece" and rank == world - 1:
            # by hand, on the rank that owns the end of the last unit only
            piece = dict(twin.model.named_parameters())["blocks.3.down.bias"].grad
            with torch._C.DisableTorchFunctionSubclass():
                piece[-1] = INF
        for model, scaler, optimizer in zip(twin.both, scalers, twin.optimizers, strict=True):
            scaler.unscale_(optimizer)
            if not bad:
                torch.nn.utils.clip_grad_value_(model.parameters(), 2**-6)
            scaler.step(optimizer)
            scaler.update()
        twin.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == [256.0, 128.0, 64.0, 64.0, 128.0][step]
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("where", ("loss", "piece"))
@EACH_STAGE
def test_grad_scaler_finds_inf_on_one_rank(ranks: Ranks, stage: int, where: str) -> None:
    ranks(2).run(_scaler, stage, where)


# ---- penalties on the leaves
PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: sum(p.norm() for p in model.parameters()),
    "pow(2).sum": lambda model: sum(p.pow(2).sum() for p in model.parameters()),
    "sum": lambda model: sum(p.sum() for p in model.parameters()),
}


def _penalty(rank: int, world: int, stage: int, name: str) -> None:
    """Regularisation through `model.parameters()` has its gradient, or is refused."""
    penalty = PENALTIES[name]
    twin = Twin(rank, world, stage)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return loss_of(model, ids) + 2**-3 * penalty(model)

    twin.plain_backward(0, loss=loss)
    try:
        value = loss(twin.model, batch(rank))
        value.backward()
    except rg.UnsupportedError:
        twin.close()
        return
    expected = loss(twin.plain, batch(rank))
    assert torch.allclose(value, expected), f"the loss is {value.item()}, on plain torch {expected.item()}"
    grads = twin.engine.full_grads()
    for key, param in twin.plain.named_parameters():
        # The mean of sums is not rounded as the sum of means is.
        assert torch.allclose(grads[key], param.grad, rtol=1e-5, atol=1e-7), key
    twin.close()


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_through_the_leaves(ranks: Ranks, name: str) -> None:
    ranks(2).run(_penalty, 3, name)


# ---- optimizers that look at more than elements
class Lamb(torch.optim.Optimizer):
    """The part of LAMB that matters here: a step is scaled by norms of whole parameters and of state made of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].mul_(0.5).add_(p.grad, alpha=0.5)
                update = state["average"] * 2
                ratio = p.norm() / update.norm().clamp_min(2**-20)
                p.add_(update * ratio, alpha=-(2**-5))


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=2**-3, max_iter=3, history_size=4)


def _adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=RATE)


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=RATE)


WHOLE = {"lamb": Lamb, "lbfgs": _lbfgs, "adafactor": _adafactor, "muon": _muon}


def _whole_optimizer(rank: int, world: int, name: str) -> None:
    """Equal to plain torch but for rounding: never silently another optimizer."""
    twin = Twin(rank, world, 3)
    start = {key: value.clone() for key, value in twin.plain.state_dict().items()}
    twin.optimize(WHOLE[name])
    for step in range(3):
        _closures(twin, step)
        for optimizer in twin.optimizers:  # as after a restart
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = twin.model.state_dict()
    for key, expected in twin.plain.state_dict().items():
        # One rounding of a norm moves all of a parameter; measured against how far it went.
        moved, off = (expected - start[key]).norm(), (state[key] - expected).norm()
        assert off <= 1e-4 * moved, f"{key} went {moved:.3g} and is off by {off:.3g}"
    twin.close()


def _closures(twin: Twin, step: int) -> None:
    def plain() -> Tensor:
        twin.plain.zero_grad()
        twin.plain_backward(step)
        with torch.no_grad():
            return torch.stack([loss_of(twin.plain, batch(r, step)) for r in range(twin.world)]).mean()

    def ours() -> Tensor:
        twin.model.zero_grad()
        loss = loss_of(twin.model, batch(twin.rank, step))
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total / twin.world

    for optimizer, closure in zip(twin.optimizers, (plain, ours), strict=True):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_whole_parameters(ranks: Ranks, name: str) -> None:
    ranks(2).run(_whole_optimizer, name)


def _norm_dtypes(rank: int, world: int) -> None:
    model = nn.Sequential(build().blocks[0], build(4).blocks[1].double())
    rg.shard(model, 3)
    (model[0](torch.ones(2, 12)).sum() + model[1](torch.ones(2, 12).double()).sum()).backward()
    for param in model.parameters():
        assert param.grad.norm().dtype == param.dtype and param.norm().dtype == param.dtype
    torch.distributed.barrier()


def test_norms_keep_their_dtype(ranks: Ranks) -> None:
    ranks(2).run(_norm_dtypes)
