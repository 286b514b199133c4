"""Backward in whatever words: the engine's, `scale()`, plain torch's, several engines, retained graphs, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde.deepspeed as deepspeed
from retrograde.gradients.bucket import LARGE
from tests.deepspeed.models import checkpointed_models, inputs, two_layers
from tests.deepspeed.pair import Pair, build_with_loss, config
from tests.harness import Ranks
from tests.reference import Program, mean, play, same
from tests.small import Tiled, batch
from tests.stages import EACH_STAGE

Engine = deepspeed.DeepSpeedEngine


# ---- one program, on the engine and on plain torch
class Plain:
    """The engine's words, on one rank of plain torch."""

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self.model, self.accumulation = model, accumulation
        # As `.grad` would have it where every backward is divided, whoever starts it.
        self._hooks = [p.register_hook(self._divide) for p in model.parameters() if p.requires_grad]
        self._divides = True

    def _divide(self, grad: Tensor) -> Tensor:
        return grad / self.accumulation if self._divides else grad

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        self._divides = scale_wrt_gas
        loss.backward(retain_graph=retain_graph)
        self._divides = True

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        return loss

    @property
    def module(self) -> nn.Module:
        return self.model

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


Words = Callable[[Any, int], None]  # a program: of an engine and a rank
WORDS: dict[str, Words] = {}


def words(fn: Words) -> Words:
    WORDS[fn.__name__] = fn
    return fn


@words
def engine_backward(engine: Any, rank: int) -> None:
    engine.backward(engine(batch(rank)))


@words
def scaled_by_hand(engine: Any, rank: int) -> None:
    engine.scale(engine(batch(rank))).backward()


@words
def plain_backward(engine: Any, rank: int) -> None:
    engine(batch(rank)).backward()


@words
def not_divided(engine: Any, rank: int) -> None:
    engine.backward(engine(batch(rank, 0)), scale_wrt_gas=False)
    engine(batch(rank, 1)).backward()  # is


@words
def all_three(engine: Any, rank: int) -> None:
    engine.backward(engine(batch(rank, 0)))
    engine(batch(rank, 1)).backward()
    engine.scale(engine(batch(rank, 2))).backward()


@words
def twice_over_one_forward(engine: Any, rank: int) -> None:
    loss = engine(batch(rank))
    engine.backward(loss.square(), retain_graph=True)
    engine.backward(loss)


@words
def twice_by_hand(engine: Any, rank: int) -> None:
    loss = engine(batch(rank))
    engine.scale(loss.square()).backward(retain_graph=True)
    loss.backward()


@words
def scaled_and_retained(engine: Any, rank: int) -> None:
    """`scale()` is told that the graph is kept, and the backward by hand keeps it; three backwards over one forward."""
    loss = engine(batch(rank))
    engine.scale(loss, retain_graph=True).backward(retain_graph=True)
    engine.scale(loss.square(), retain_graph=True).backward(retain_graph=True)
    engine.backward(loss)


@words
def forwards_first(engine: Any, rank: int) -> None:
    losses = [engine(batch(rank, part)) for part in range(4)]
    for loss in losses:
        engine.backward(loss)


@words
def weight_in_the_loss(engine: Any, rank: int) -> None:
    loss = engine(batch(rank)) + engine.module.embed.weight.square().mean()
    engine.backward(loss)


@words
def penalty(engine: Any, rank: int) -> None:
    """What `autograd.grad` returns is not divided; what the backward adds is, once."""
    hidden = engine.module.embed(batch(rank)).detach().requires_grad_()
    out = engine.module.blocks[0](hidden)
    (grad,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    engine.backward(out.mean() + grad.square().sum())


@words
def part_of_a_graph(engine: Any, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of references in a circle
        engine(batch(rank)).backward(create_graph=True)


@words
def tiled_loss(engine: Any, rank: int) -> None:
    x = engine.module.embed(batch(rank))
    for block in engine.module.blocks:
        x = block(x)
    engine.backward(Tiled.apply(x, engine.module.head))


@words
def only_some_ranks(engine: Any, rank: int) -> None:
    engine.backward(engine(batch(rank)))
    if rank == 1:
        engine.backward(engine(batch(rank, 1)))


def _on_plain(program: Words, accumulation: int) -> Program:
    def on_model(model: nn.Module, rank: int) -> None:
        plain = Plain(model, accumulation)
        try:
            program(plain, rank)
        finally:
            plain.close()

    return on_model


def _all_words(rank: int, world: int, stage: int, accumulation: int) -> list[str]:
    faults = []
    for name, program in WORDS.items():
        engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(stage, accumulation))
        program(engine, rank)
        plain = build_with_loss()
        play(plain, world, _on_plain(program, accumulation), stage)
        grads = engine.sharded.full_grads()  # all ranks, however many backwards each has done
        faults += [f"{name}: {n}" for n, p in plain.named_parameters() if not same(grads[n], p.grad)]
        dist.barrier()
    return faults


@EACH_STAGE
@pytest.mark.parametrize("accumulation", (1, 4, 3))
def test_gradients_are_plain_torchs(ranks: Ranks, stage: int, accumulation: int) -> None:
    assert ranks(2).run(_all_words, stage, accumulation) == [[], []]


def _asked_for(rank: int, world: int, stage: int) -> list[str]:
    """`torch.autograd.grad` accumulates nothing, and is not divided."""
    engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(stage, 4))
    names, params = zip(*engine.module.named_parameters(), strict=True)
    found = [grad.full_tensor() for grad in torch.autograd.grad(engine(batch(rank)), params)]
    by_rank = []
    for other in range(world):
        plain = build_with_loss()
        by_rank.append(torch.autograd.grad(plain(batch(other)), list(plain.parameters())))
    wanted = [mean(grads, world) for grads in zip(*by_rank, strict=True)]
    dist.barrier()
    return [name for name, ours, theirs in zip(names, found, wanted, strict=True) if not same(ours, theirs)]


@EACH_STAGE
def test_gradients_that_are_asked_for_are_not_divided(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_asked_for, stage) == [[], []]


def _wide() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(LARGE // 4096, 1024, bias=False)


def _large(rank: int, world: int, stage: int) -> list[str]:
    """A gradient that is sent from where autograd left it, divided."""
    pair = Pair(rank, world, config(stage, 2), make=_wide)

    def program(model: Any, rank: int) -> None:
        for part in range(2):
            x = torch.randn(2, LARGE // 4096, generator=torch.Generator().manual_seed(10 * part + rank))
            model(x).square().mean().backward()

    program(pair.engine, rank)
    pair.plain_play(_on_plain(program, 2))
    wrong = pair.wrong_grads()
    pair.close()
    return wrong


@EACH_STAGE
def test_large_gradients_are_divided(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_large, stage) == [[], []]


def _returned(rank: int, world: int) -> tuple[bool, bool, bool]:
    engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(3, 4))
    loss = engine(batch(rank))
    divided = engine.backward(loss, retain_graph=True)
    whole = engine.backward(loss, scale_wrt_gas=False)
    dist.barrier()
    return torch.equal(divided, loss / 4), torch.equal(whole, loss), divided.requires_grad


def test_backward_returns_the_loss_as_it_was_divided(ranks: Ranks) -> None:
    assert ranks(2).run(_returned) == [(True, True, False)] * 2


# ---- outputs that are no scalars, losses that are elsewhere, several engines
def _not_scalar(rank: int, world: int, stage: int, elsewhere: bool) -> tuple[list[str], list[str]]:
    pair = Pair(rank, world, config(stage, 2), make=two_layers)

    def program(model: Any, rank: int) -> None:
        out = model(inputs(rank))
        if elsewhere:
            F.cross_entropy(out, torch.tensor([1, 3])).backward()
        else:
            out.backward(torch.ones_like(out))

    program(pair.engine, rank)
    pair.plain_play(_on_plain(program, 2))
    wrong = pair.wrong_grads()
    pair.engine.set_gradient_accumulation_boundary(True)
    pair.engine.step()
    pair.plain_step()
    weights = pair.wrong_weights()
    pair.close()
    return wrong, weights


@EACH_STAGE
@pytest.mark.parametrize("elsewhere", (False, True))
def test_outputs_that_are_no_losses(ranks: Ranks, stage: int, elsewhere: bool) -> None:
    assert ranks(2).run(_not_scalar, stage, elsewhere) == [([], [])] * 2


def _several_engines(rank: int, world: int, stage: int) -> list[str]:
    """One loss over three engines, two of them one behind the other, each with an accumulation of its own."""
    steps = (1, 2, 4)
    pairs = [Pair(rank, world, config(stage, n), make=partial(two_layers, n)) for n in steps]

    def loss(models: list[Any], x: Tensor) -> Tensor:
        return (models[0](x) + models[2](models[1](x))).square().mean()

    for step in range(2):
        loss([pair.engine for pair in pairs], inputs(rank, step)).backward()
        by_hand = nn.ModuleList(pair.plain for pair in pairs)

        def program(models: Any, rank: int, step: int = step) -> None:
            plains = [Plain(model, n) for model, n in zip(models, steps, strict=True)]
            loss(list(models), inputs(rank, step)).backward()
            for plain in plains:
                plain.close()

        play(by_hand, world, program, stage)
        for pair in pairs:
            assert pair.wrong_grads() == []
            pair.engine.set_gradient_accumulation_boundary(True)
            pair.engine.step()
            pair.optimizer.zero_grad()
            pair.plain_step()
    wrong = [name for pair in pairs for name in pair.wrong_weights()]
    dist.barrier()
    return wrong


@EACH_STAGE
def test_several_engines_in_one_loss(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_several_engines, stage) == [[], []]


# ---- checkpoints, frozen parts
def _open_pages(engine: Engine) -> list[str]:
    return [unit.name for unit in engine.sharded.units if unit.page.storage is not None]


def _checkpointed(rank: int, world: int, stage: int, reentrant: bool, persistent: bool) -> list[str]:
    faults = []
    zero = {"stage3_param_persistence_threshold": 10**6} if persistent else {}
    for name, make in checkpointed_models(reentrant).items():
        pair = Pair(rank, world, config(stage, 2, zero_optimization=zero), make=make)
        for step in range(2):
            for part in range(2):
                x = inputs(rank, 2 * step + part, needs_grad=reentrant or part == 0)
                pair.engine.backward(pair.engine(x).sum())
                if stage == 3 and bool(_open_pages(pair.engine)) is not persistent:
                    faults.append(f"{name}: pages after backward {part}: {_open_pages(pair.engine)}")
                pair.engine.step()

            def program(model: nn.Module, rank: int, step: int = step) -> None:
                for part in range(2):
                    x = inputs(rank, 2 * step + part, needs_grad=reentrant or part == 0)
                    (model(x).sum() / 2).backward()

            pair.plain_play(program)
            pair.plain_step()
        faults += [f"{name}: {wrong}" for wrong in pair.wrong_weights()]
        pair.close()
    return faults


@EACH_STAGE
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_and_frozen_parts(ranks: Ranks, stage: int, reentrant: bool) -> None:
    for persistent in (False, True) if stage == 3 else (False,):
        assert ranks(2).run(_checkpointed, stage, reentrant, persistent) == [[], []]


# ---- accumulation that is not managed
def _counts_of_backwards(rank: int, world: int, stage: int, managed: bool) -> tuple[list[str], list[int], list[bool]]:
    """By hand, as many backwards to a step as one likes; managed, every second step updates."""
    pair = Pair(rank, world, config(stage, 2, managed_gradient_accumulation=managed))
    counts = (2, 5, 3) if not managed else (2, 2)
    samples, applied, part = [], [], 0
    for count in counts:
        for _ in range(count):
            pair.engine.backward(pair.engine(batch(rank, part)))
            part += 1
            if managed:
                pair.engine.step()
                applied.append(pair.engine.was_step_applied())
        if not managed:
            pair.engine.step()
            applied.append(pair.engine.was_step_applied())
        samples.append(pair.engine.global_samples)

        def program(model: nn.Module, rank: int, parts: range = range(part - count, part)) -> None:
            for each in parts:
                (model(batch(rank, each)) / 2).backward()

        pair.plain_play(program)
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong, samples, applied


@EACH_STAGE
def test_who_says_where_the_boundary_is(ranks: Ranks, stage: int) -> None:
    for wrong, samples, applied in ranks(2).run(_counts_of_backwards, stage, False):
        assert wrong == [] and samples == [4 * n for n in (2, 7, 10)] and applied == [True] * 3
    for wrong, samples, applied in ranks(2).run(_counts_of_backwards, stage, True):
        assert wrong == [] and samples == [8, 16] and applied == [False, True] * 2
