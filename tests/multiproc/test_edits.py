"""Weights that users change: through leaves, through full tensors, by loading, and what others see meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import RATE, Twin
from tests.small import batch, build, loss_of
from tests.stages import ALONE_OR_NOT, EACH_STAGE, PAGE_STAGES, WHOLE_STAGES, WITH_OTHERS

Edit = Callable[[nn.Module], Any]


def _each(edit: Callable[[nn.Parameter], Any]) -> Edit:
    def all_of(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                edit(param)

    return all_of


def _assign(param: nn.Parameter) -> None:
    param.data = param.data * 0.5


def _slice(param: nn.Parameter) -> None:
    param[:] = 0.25


def _augmented(param: nn.Parameter) -> None:
    param *= 0.5


THROUGH_LEAVES: dict[str, Edit] = {
    "p.clamp_": _each(lambda p: p.clamp_(-0.1, 0.1)),
    "p.data.mul_": _each(lambda p: p.data.mul_(0.5)),
    "p.detach().add_": _each(lambda p: p.detach().add_(0.125)),
    "p.view(-1).mul_": _each(lambda p: p.view(-1).mul_(0.5)),
    "p.copy_": _each(lambda p: p.copy_(p * 0.5)),
    "p.data =": _each(_assign),
    "p[:] =": _each(_slice),
    "p *=": _each(_augmented),
    "torch.mul(out=p)": _each(lambda p: torch.mul(p.detach(), 0.5, out=p.data)),
    "_foreach_mul_": torch.no_grad()(lambda model: torch._foreach_mul_(list(model.parameters()), 0.5)),
    "_foreach_add_": torch.no_grad()(lambda m: torch._foreach_add_([p.data for p in m.parameters()], 0.125)),
    "init.constant_": lambda model: [nn.init.constant_(p, 0.25) for p in model.parameters()],
    "decay by hand": torch.no_grad()(lambda m: [p.mul_(1 - 2**-6) for n, p in m.named_parameters() if "bias" not in n]),
}


def _fill_row(model: nn.Module) -> None:
    model.head.weight[2] = 0.5
    model.blocks[2].up.weight[1:3, :4] += 0.25


THROUGH_FULL: dict[str, Edit] = {
    "module.weight.clamp_": lambda m: m.blocks[1].up.weight.clamp_(-0.1, 0.1),
    "module.weight.data.fill_": lambda m: (m.blocks[3].down.weight.data.fill_(0.25), m.head.weight.data.mul_(0.5)),
    "module.weight.detach().mul_": lambda m: m.embed.weight.detach().mul_(0.5),
    "module.weight[...] =": _fill_row,
    "module.weight.data =": lambda m: setattr(m.blocks[0].up.weight, "data", m.blocks[0].up.weight * 0.5),
    "module.weight.view(-1).zero_": lambda m: m.blocks[2].down.weight.view(-1)[5:9].zero_(),
    "module.weight.T.mul_": lambda m: m.blocks[2].up.weight.T.mul_(0.5),
    "init.ones_": lambda m: (nn.init.ones_(m.blocks[0].norm.weight), nn.init.zeros_(m.head.bias)),
    "init.normal_, seeded": lambda m: (torch.manual_seed(5), nn.init.normal_(m.blocks[1].up.weight)),
    "renorm by row": lambda m: m.head.weight.div_(m.head.weight.norm(dim=1, keepdim=True)),
}
EDITS = THROUGH_LEAVES | THROUGH_FULL


def _edit(rank: int, world: int, stage: int, name: str, options: dict[str, Any]) -> None:
    """Before any use, after a forward, after a step; seen by the next forward, backward and state_dict."""
    edit = torch.no_grad()(EDITS[name])
    twin = Twin(rank, world, stage, **options)
    twin.optimize()
    for step in range(3):
        for model in twin.both:
            if step == 1:
                model(batch(rank, 70))
            edit(model)
        if step != 2:
            assert torch.equal(twin.model(batch(rank, 80)), twin.plain(batch(rank, 80))), step
        twin.backward(step)
        twin.check_grads()
        twin.step()
        twin.zero_grad()
    for model in twin.both:
        edit(model)
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("name", EDITS)
@PAGE_STAGES
def test_edits(ranks: Ranks, stage: int, name: str) -> None:
    ranks(2).run(_edit, stage, name, {"timeout": 15})


@pytest.mark.parametrize("name", ("p.data.mul_", "module.weight.data.fill_", "module.weight.clamp_"))
@pytest.mark.parametrize("options", ({"resident": "1GiB"}, {"prefetch": False}), ids=str)
def test_edits_with_other_policies(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    ranks(4).run(_edit, 3, name, {"timeout": 15} | options)


def _grad_mode(rank: int, world: int, stage: int) -> None:
    """As torch: a weight that requires grad is not edited in place while gradients are recorded."""
    twin = Twin(rank, world, stage)
    leaf = dict(twin.model.named_parameters())["head.weight"]
    model = twin.model
    for wrong in (lambda: leaf.mul_(2), lambda: model.head.weight.mul_(2), lambda: model.embed.weight.zero_()):
        with pytest.raises(RuntimeError, match=r"requires grad.*in-place"):
            wrong()
    twin.check_weights()
    twin.close()


@PAGE_STAGES
def test_edits_need_no_grad(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_grad_mode, stage)


def _full_params(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    twin.train(0)
    expected = dict(twin.plain.named_parameters())
    with twin.engine.full_params() as full:
        assert list(full) == list(expected)
        assert all(torch.equal(full[name], expected[name]) for name in full)
    with twin.engine.full_params(twin.model.blocks[1], twin.model.head) as full:
        assert set(full) == {n for n in expected if n.startswith(("blocks.1.", "head."))}
        assert torch.equal(twin.model.head.weight, expected["head.weight"])
    assert [n for n, _ in twin.engine.iter_full_params()] == [n for u in twin.engine.units for n in _names(u)]
    assert all(torch.equal(value, expected[name]) for name, value in twin.engine.iter_full_params())

    with twin.engine.full_params(write=True) as full:
        for name, tensor in full.items():
            tensor.mul_(0.5)
            expected[name].data.mul_(0.5)
    twin.check_weights()
    with twin.engine.full_params(twin.model.blocks[2], write=True):
        twin.model.blocks[2].up.weight.fill_(0.125)
    with torch.no_grad():
        twin.plain.blocks[2].up.weight.fill_(0.125)
    assert torch.equal(twin.model(batch(rank)), twin.plain(batch(rank)))
    twin.train(1)
    twin.check_weights()
    twin.close()


def _names(unit: Any) -> list[str]:
    return [slot.name for slot in unit.layout.slots]


@ALONE_OR_NOT
@PAGE_STAGES
def test_full_params(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_full_params, stage)


# ---- functions that write to full tensors without telling
def _foreach(model: nn.Module) -> None:
    torch._foreach_mul_([model.blocks[1].up.weight, model.head.weight], 0.5)


def _out(model: nn.Module) -> None:
    weight = model.blocks[1].up.weight
    torch.mul(weight.detach().clone(), 0.5, out=weight)


UNTOLD: dict[str, Edit] = {"foreach": _foreach, "out=": _out}


def _untold(rank: int, world: int, stage: int, name: str) -> None:
    """All ranks make the edit, each at its own pace, and meet before they read."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    for step in range(2):
        twin.train(step)
        for model in twin.both:
            model(batch(rank, 70))
            dist.barrier()
            torch.no_grad()(UNTOLD[name])(model)
        assert torch.equal(twin.model(batch(rank, 80)), twin.plain(batch(rank, 80))), step
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("name", UNTOLD)
@EACH_STAGE
def test_edits_by_functions(ranks: Ranks, stage: int, name: str) -> None:
    ranks(2).run(_untold, stage, name)


def _too_early(rank: int, world: int, stage: int, name: str, frozen: bool) -> str:
    """Rank 0 edits while rank 1 has yet to read the weights as they were."""
    model = build()
    model.requires_grad_(not frozen)
    rg.shard(model, stage, timeout=3.0)
    try:
        if rank == 0:
            torch.no_grad()(UNTOLD[name])(model)
            dist.barrier()
            time.sleep(1.0)  # the other is the first to give up
            model.get_parameter("head.weight").detach().norm()  # all ranks meet for it
        else:
            dist.barrier()
            model(batch(rank))
    except rg.DivergenceError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
@pytest.mark.parametrize("name", UNTOLD)
@WHOLE_STAGES
def test_an_edit_by_a_function_before_others_have_read(ranks: Ranks, stage: int, name: str, frozen: bool) -> None:
    for said in ranks(2).run(_too_early, stage, name, frozen):
        assert "has written to the full tensor of parameter" in said and "full_params(write=True)" in said
        assert frozen or "parameter blocks.1.up.weight" in said or "parameter head.weight" in said


# ---- loops without an optimizer, averages
def _manual_sgd(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    for step in range(4):
        twin.backward(step, step + 10)
        with torch.no_grad():
            for model in twin.both:
                for param in model.parameters():
                    param.sub_(param.grad * RATE) if step % 2 else param.data.add_(param.grad, alpha=-RATE)
                    param.grad = None
    twin.check()
    twin.close()


@PAGE_STAGES
def test_manual_sgd(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_manual_sgd, stage)


def _swap_copy(params: list[Tensor], average: list[Tensor]) -> Callable[[], None]:
    kept = [p.detach().clone() for p in params]
    for p, value in zip(params, average, strict=True):
        p.data.copy_(value)

    def back() -> None:
        for p, value in zip(params, kept, strict=True):
            p.data.copy_(value)

    return back


def _swap_data(params: list[Tensor], average: list[Tensor]) -> Callable[[], None]:
    """Without a copy: what `p.data` was before is kept by its name."""
    kept = [p.data for p in params]
    for p, value in zip(params, average, strict=True):
        p.data = value

    def back() -> None:
        for p, value in zip(params, kept, strict=True):
            p.data = value

    return back


def _swap_tuple(params: list[Tensor], average: list[Tensor]) -> Callable[[], None]:
    def swap() -> None:
        for p, value in zip(params, average, strict=True):
            p.data, value.data = value.data, p.data

    swap()
    return swap


SWAPS = {"copy": _swap_copy, "data": _swap_data, "tuple": _swap_tuple}


def _ema(rank: int, world: int, stage: int, swap: str) -> None:
    """Swap in, evaluate, swap out, with one rank far behind: nobody may see the other's weights of another time."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    averages = [[p.detach().clone() for p in model.parameters()] for model in twin.both]
    for step in range(3):
        twin.train(step)
        losses = []
        for model, average in zip(twin.both, averages, strict=True):
            params = list(model.parameters())
            torch._foreach_lerp_(average, [p.detach() for p in params], 0.5)
            slow = model is twin.model and rank == 1
            time.sleep(0.15 * slow)
            back = SWAPS[swap](params, average)
            time.sleep(0.15 * slow)
            with torch.no_grad():
                losses.append(loss_of(model, batch(rank, 60)))
            time.sleep(0.15 * slow)
            back()
        assert torch.equal(*losses), step
        with torch.no_grad():
            assert torch.equal(twin.model(batch(rank, 61)), twin.plain(batch(rank, 61))), step
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("swap", SWAPS)
@PAGE_STAGES
def test_ema_with_a_slow_rank(ranks: Ranks, stage: int, swap: str) -> None:
    ranks(2).run(_ema, stage, swap)


# ---- one rank alone
def _one_edits(rank: int, world: int, stage: int) -> float:
    """Rank 0 edits what it has of a weight; the others learn of it with the step."""
    model = build()
    rg.shard(model, stage, timeout=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, batch(rank, step)).backward()
        if rank == 0:
            with torch.no_grad():
                model.get_parameter("head.weight").mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
    norm = float(model.head.weight.detach().norm())
    dist.barrier()
    return norm


@PAGE_STAGES
def test_an_edit_on_one_rank_only(ranks: Ranks, stage: int) -> None:
    norms = ranks(2).run(_one_edits, stage)
    assert norms[0] == norms[1]


def _alone(rank: int, world: int, stage: int) -> None:
    """Rank 0 evaluates and saves while the others wait in a barrier that knows nothing of it."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    for step in range(2):
        twin.train(step)
        if rank == 0:
            with torch.no_grad():
                for other in range(3):
                    assert torch.equal(twin.model(batch(other, 90)), twin.plain(batch(other, 90)))
            state = twin.model.state_dict()
            assert all(torch.equal(state[name], value) for name, value in twin.plain.state_dict().items())
            with twin.engine.full_params(twin.model.head) as full:
                assert torch.equal(full["head.weight"], twin.plain.head.weight)
        dist.barrier()
    twin.train(2)
    twin.check_weights()
    twin.close()


@WITH_OTHERS
@PAGE_STAGES
def test_rank_0_evaluates_while_the_others_wait(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_alone, stage)


def _stale(rank: int, world: int, stage: int, name: str) -> None:
    """An edit between forward and backward makes the graph stale, as in torch; the next step is clean."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    loss = loss_of(twin.model, batch(rank))
    for model in twin.both:
        torch.no_grad()(EDITS[name])(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    twin.zero_grad()
    twin.train(1)
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("name", ("p.clamp_", "_foreach_mul_", "module.weight.clamp_", "module.weight[...] ="))
@PAGE_STAGES
def test_an_edit_makes_older_graphs_stale(ranks: Ranks, stage: int, name: str) -> None:
    ranks(2).run(_stale, stage, name)
