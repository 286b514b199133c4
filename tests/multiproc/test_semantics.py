"""A sharded model is used as a torch model is: objects, optimizers, hooks, modes, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import MOMENTUM, RATE, Twin, sgd
from tests.reference import play, same
from tests.small import Block, Small, backwards, batch, build, loss_of
from tests.stages import ALONE_OR_NOT, EACH_STAGE


# ---- objects
def _identity(rank: int, world: int, stage: int) -> None:
    model = build()
    before = dict(model.named_parameters())
    modules = dict(model.named_modules())
    classes = {name: type(module) for name, module in modules.items()}
    text = repr(model)
    rg.shard(model, stage)
    assert list(dict(model.named_parameters())) == list(before)
    assert all(param is before[name] for name, param in model.named_parameters())
    assert all(isinstance(param, nn.Parameter) and param.is_leaf for param in model.parameters())
    assert all(module is modules[name] for name, module in model.named_modules())
    for name, module in model.named_modules():
        assert isinstance(module, classes[name])
        assert type(module).__name__ == classes[name].__name__
        assert type(module).__module__ == classes[name].__module__
    assert type(model).__qualname__ == Small.__qualname__ and isinstance(model.blocks[0], Block)
    assert repr(model) == text
    assert model.head.weight.shape == (17, 12) and model.head.weight.dtype is torch.float32
    assert model.head.weight.requires_grad and isinstance(model.head, nn.Linear)
    whole = sum(param.numel() for param in build().parameters())
    assert sum(param.numel() for param in model.parameters()) == whole
    assert sum(param.local.numel() for param in model.parameters()) <= -(-whole // world) + world * len(before)
    torch.distributed.barrier()


@ALONE_OR_NOT
@EACH_STAGE
def test_objects_names_and_classes_stay(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_identity, stage)


# ---- optimizers
def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=RATE, betas=(0.5, 0.5), eps=2**-20, foreach=False)


def _groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    decayed = {"params": params[::2], "weight_decay": 2**-3, "lr": 2**-5}
    return torch.optim.SGD([decayed, {"params": params[1::2]}], lr=RATE, momentum=MOMENTUM, nesterov=True)


OPTIMIZERS = {"sgd": sgd, "adam": _adam, "groups": _groups}


def _train(rank: int, world: int, stage: int, name: str, first: bool) -> None:
    """`first`: the optimizer is older than the shards."""
    make = OPTIMIZERS[name]
    early: list[torch.optim.Optimizer] = []

    def model() -> nn.Module:
        made = build()
        if first:
            early.append(make(made.parameters()))
        return made

    twin = Twin(rank, world, stage, model)
    if first:
        twin.optimizers = early
    else:
        twin.optimize(make)
    for step in range(4):
        twin.train(step)
    twin.check_weights()
    ours = twin.optimizers[1]
    for param, state in ours.state.items():
        for value in state.values():
            assert value is None or value.dim() == 0 or value.shape == param.shape
    twin.close()


@pytest.mark.parametrize("first", (False, True))
@pytest.mark.parametrize("name", OPTIMIZERS)
@EACH_STAGE
def test_optimizers_made_before_and_after(ranks: Ranks, stage: int, name: str, first: bool) -> None:
    ranks(2).run(_train, stage, name, first)


def _two_optimizers(rank: int, world: int, stage: int) -> None:
    """Two optimizers over parts of one model, a group added late, a learning rate scheduled."""
    twin = Twin(rank, world, stage)
    schedules = []
    for model in twin.both:
        front = torch.optim.SGD(model.embed.parameters(), lr=RATE)
        back = torch.optim.SGD(model.blocks.parameters(), lr=RATE)
        back.add_param_group({"params": list(model.head.parameters()), "lr": 2**-6})
        twin.optimizers += [front, back]
        schedules += [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (front, back)]
    for step in range(4):
        twin.train(step)
        for schedule in schedules:
            schedule.step()
    twin.check_weights()
    twin.close()


@EACH_STAGE
def test_two_optimizers_and_a_schedule(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_two_optimizers, stage)


# ---- zero_grad
def _zero_grad(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    twin.zero_grad()  # nothing there yet
    twin.zero_grad(set_to_none=False)
    twin.backward(0)
    twin.zero_grad()
    assert all(param.grad is None for param in twin.model.parameters())
    twin.backward(1)
    twin.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in twin.model.parameters())
    twin.check_grads()
    twin.backward(2)
    twin.check_grads()
    twin.optimizers[0].zero_grad()
    twin.optimizers[1].zero_grad()
    twin.backward(3)
    for model in twin.both:
        del dict(model.named_parameters())["head.bias"].grad
        dict(model.named_parameters())["blocks.1.up.weight"].grad = None
    twin.check_grads()
    twin.step()
    twin.check()
    twin.close()


@EACH_STAGE
def test_zero_grad_at_any_time(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_zero_grad, stage)


# ---- hooks
class Hooks:
    """Hooks that change gradients: times 2 on the way to the leaf, times 4 when they are there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor]] = []

    def register(self, model: nn.Module, names: tuple[str, ...]) -> None:
        for name, param in model.named_parameters():
            if name in names:
                param.register_hook(lambda grad, name=name: self._scaled(name, grad))
                param.register_post_accumulate_grad_hook(lambda param, name=name: self._arrived(name, param))

    def _scaled(self, name: str, grad: Tensor) -> Tensor:
        self.calls.append((f"hook {name}", grad.detach().clone()))
        return grad * 2

    def _arrived(self, name: str, param: Tensor) -> None:
        self.calls.append((f"after {name}", param.grad.detach().clone()))
        param.grad.mul_(4)


def _leaf_hooks(rank: int, world: int, stage: int) -> None:
    """Registered before and after sharding; what they see adds up to the whole."""
    early, late = ("head.weight", "blocks.2.up.bias"), ("embed.weight", "blocks.0.norm.bias")
    hooked, hooks = early + late, Hooks()

    def model() -> nn.Module:
        made = build()
        hooks.register(made, early)
        return made

    twin = Twin(rank, world, stage, model)
    hooks.register(twin.model, late)
    loss_of(twin.model, batch(rank)).backward()
    twin.engine.full_grad("head.weight")
    once = [f"hook {name}" for name in hooked] + [f"after {name}" for name in hooked]
    assert sorted(name for name, _ in hooks.calls) == sorted(once)
    seen = dict(hooks.calls)
    pieces = dict(twin.model.named_parameters())
    assert all(seen[f"hook {name}"].shape == pieces[name].shape for name in hooked)
    assert all(torch.equal(seen[f"after {name}"], 2 * seen[f"hook {name}"]) for name in hooked)
    reference = build()  # without hooks: a hook on a mean is a hook on each of its terms
    play(reference, world, backwards(0), stage)
    for name, param in reference.named_parameters():
        factor = 8 if name in hooked else 1
        whole = twin.engine.full_grad(name)
        assert param.grad is not None and same(whole, param.grad * factor), name
    twin.close()


@EACH_STAGE
def test_leaf_hooks_before_and_after(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_leaf_hooks, stage)


def _hook_handles(rank: int, world: int, stage: int) -> None:
    """A handle removes its hook, also one that is older than the shards."""
    model = build()
    calls: list[str] = []
    bias = dict(model.named_parameters())["head.bias"]
    handles = [
        bias.register_hook(lambda grad: calls.append("early hook")),
        bias.register_post_accumulate_grad_hook(lambda param: calls.append("early after")),
    ]
    engine = rg.shard(model, stage)
    handles += [
        bias.register_hook(lambda grad: calls.append("late hook")),
        bias.register_post_accumulate_grad_hook(lambda param: calls.append("late after")),
    ]
    for expected in (["early hook", "late hook", "early after", "late after"], []):
        calls.clear()
        loss_of(model, batch(rank)).backward()
        engine.full_grad("head.bias")
        assert calls == expected, calls
        for handle in handles:
            handle.remove()
    bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require grad"):
        bias.register_hook(lambda grad: None)
    torch.distributed.barrier()


@EACH_STAGE
def test_hooks_can_be_removed(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_hook_handles, stage)


def _module_hooks(rank: int, world: int, stage: int) -> None:
    calls: dict[int, list[tuple[str, Tensor]]] = {}

    def listen(model: nn.Module, when: str) -> None:
        mine = calls.setdefault(id(model), [])

        def note(what: str, value: Any) -> None:
            mine.append((f"{when} {what}", (value[0] if isinstance(value, tuple) else value).detach().clone()))

        block = model.blocks[1]
        block.register_forward_pre_hook(lambda m, args: note("pre", args))
        block.up.register_forward_hook(lambda m, args, out: note("forward", out))
        block.register_forward_hook(lambda m, args, out: out * 2)
        block.register_full_backward_pre_hook(lambda m, grads: note("backward pre", grads))
        block.down.register_full_backward_hook(lambda m, into, outof: note("backward", outof))

    def model() -> nn.Module:
        made = build()
        listen(made, "early")
        return made

    twin = Twin(rank, world, stage, model)
    for each in twin.both:
        listen(each, "late")
    for each in twin.both:
        loss_of(each, batch(rank)).backward()
    plain, sharded = (calls[id(each)] for each in twin.both)
    assert [name for name, _ in sharded] == [name for name, _ in plain] and len(plain) == 8
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain, sharded, strict=True))
    twin.close()


@EACH_STAGE
def test_module_hooks(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_module_hooks, stage)


# ---- requires_grad, modes
def _freezing(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    for step in range(6):
        for model in twin.both:
            model.blocks[step % 3].requires_grad_(step % 2 == 1)  # by module
            named = dict(model.named_parameters())
            named["head.bias"].requires_grad = step % 3 != 0  # by parameter
            named["embed.weight"].requires_grad_(step > 1)
        twin.backward(step)
        twin.check_grads()
        twin.step()
        twin.zero_grad()
    twin.check_weights()
    wanted = [param.requires_grad for param in twin.plain.parameters()]
    assert [param.requires_grad for param in twin.model.parameters()] == wanted
    assert twin.model.head.bias.requires_grad == twin.plain.head.bias.requires_grad
    twin.close()


@EACH_STAGE
def test_requires_grad_at_any_time(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_freezing, stage)


def _frozen_through_the_module(rank: int, world: int, stage: int) -> None:
    """`module.weight.requires_grad = False` is how most people freeze."""
    twin = Twin(rank, world, stage)
    for model in twin.both:
        model.head.weight.requires_grad = False
        model.embed.weight.requires_grad_(False)
    assert not dict(twin.model.named_parameters())["head.weight"].requires_grad
    twin.backward(0)
    twin.check_grads()
    for model in twin.both:
        model.head.weight.requires_grad = True
    twin.backward(1)
    twin.check_grads()
    twin.close()


@EACH_STAGE
def test_freezing_through_the_module(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_frozen_through_the_module, stage)


def _evaluation(rank: int, world: int, stage: int, mode: str) -> None:
    """Between steps, and between forward and backward."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    for step in range(2):
        loss = loss_of(twin.model, batch(rank, step))
        twin.model.eval()
        with context():
            out = twin.model(batch(rank, 50))
            assert not out.requires_grad and not twin.model.training
            assert torch.equal(out, twin.plain(batch(rank, 50)))
        twin.model.train()
        loss.backward()
        twin.plain_backward(step)
        twin.check_grads()
        with context():
            assert torch.equal(twin.model(batch(rank, 51)), twin.plain(batch(rank, 51)))
        twin.step()
        twin.zero_grad()
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("mode", ("no_grad", "inference"))
@EACH_STAGE
def test_evaluation(ranks: Ranks, stage: int, mode: str) -> None:
    ranks(2).run(_evaluation, stage, mode)


# ---- what a sharded model does not do
def _one_row(rank: int, world: int, stage: int) -> list[str]:
    """A product with a vector adds up in another order where a weight does not begin at a multiple of 16 bytes."""
    wrong = []
    for seed in range(8):
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
        model = copy.deepcopy(plain)
        engine = rg.shard(model, stage)
        x = torch.randn(1, 9)
        ours, wanted = model(x), plain(x)
        wanted.sum().backward()
        ours.sum().backward()
        grads = engine.full_grads()
        wrong += [] if same(ours, wanted) else [f"seed {seed}: output"]
        wrong += [f"seed {seed}: {n}" for n, p in plain.named_parameters() if not same(grads[n], p.grad)]
    return wrong


@EACH_STAGE
def test_one_row_is_exact(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_one_row, stage) == [[], []]


def _refusals(rank: int, world: int, stage: int) -> None:
    twin = Twin(rank, world, stage)
    twin.optimize()
    twin.train(0)
    model, weight = twin.model, dict(twin.model.named_parameters())["head.weight"]
    for attempt in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for part in (model, model.head, model.blocks[0]):
            with pytest.raises(rg.UnsupportedError, match=r"sharded \w+ cannot be pickled.*state_dict"):
                attempt(part)
    for part in (model.head, model.blocks[0]):
        with pytest.raises(rg.UnsupportedError, match=r"part of a sharded model cannot be copied.*state_dict"):
            copy.deepcopy(part)
    for attempt in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(rg.UnsupportedError, match=r"parameter head\.weight is sharded and cannot be pickled"):
            attempt(weight)
    conversions: list[Callable[[nn.Module], Any]] = [
        lambda m: m.to(torch.float64),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.to("meta"),
        lambda m: m.to(torch.empty(0, dtype=torch.float16)),
    ]
    refused = r"parameter \S+ is sharded as torch\.float32.*before rg\.shard"
    for convert in conversions:
        for part in (model, model.blocks, model.head):
            with pytest.raises(rg.UnsupportedError, match=refused):
                convert(part)
    for keep in (lambda m: m.float(), lambda m: m.cpu(), lambda m: m.to("cpu"), lambda m: m.to(torch.float32)):
        assert keep(model) is model
    for frozen in (False, True):
        model.head.weight.requires_grad_(not frozen)
        with pytest.raises(ValueError, match="leaf"):
            torch.optim.SGD([model.head.weight], lr=RATE)
    model.head.weight.requires_grad_(True)
    twin.train(1)
    twin.check_weights()
    twin.close()


@EACH_STAGE
def test_copies_and_conversions_are_refused_and_harm_nothing(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_refusals, stage)
