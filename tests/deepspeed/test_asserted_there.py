"""What DeepSpeed's own tests assert that no other file here has: docs/from_deepspeed.md lists all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde.deepspeed as deepspeed
from tests.deepspeed.models import DIM, inputs
from tests.deepspeed.pair import Pair, config
from tests.harness import Ranks
from tests.reference import Program
from tests.small import batch
from tests.stages import EACH_STAGE

CLIP = 2**-6


def _backwards(divisor: int, *parts: int) -> Program:
    def program(model: nn.Module, rank: int) -> None:
        for part in parts:
            (model(batch(rank, part)) / divisor).backward()

    return program


# ---- windows
def _clipped(rank: int, world: int, stage: int) -> list[str]:
    """Three updates, each of four backwards in a window, with clipping: nothing of a window is left for the next."""
    pair = Pair(rank, world, config(stage, 4, gradient_clipping=CLIP))
    for step in range(3):
        parts = range(4 * step, 4 * step + 4)
        with pair.engine.coalesce_grad_reduction():
            for part in parts:
                pair.engine.backward(pair.engine(batch(rank, part)))
        pair.engine.set_gradient_accumulation_boundary(True)
        pair.engine.step()
        pair.plain_play(_backwards(4, *parts), one_window=True)
        # A norm is added up in another order than torch's: with ours in torch's formula all else is the same.
        norm = torch.tensor(pair.engine.get_global_grad_norm())
        torch.nn.utils.clip_grads_with_norm_(pair.plain.parameters(), CLIP, norm)
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


@EACH_STAGE
def test_clipping_after_windows(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_clipped, stage) == [[], []]


def _read_in_a_window(rank: int, world: int, stage: int) -> list[str]:
    """`safe_get_full_grad` inside: the mean of what has come so far, of all ranks (DeepSpeed's: this rank's own)."""
    pair = Pair(rank, world, config(stage))
    faults = []
    with pair.engine.coalesce_grad_reduction():
        for parts in ((0, 1), (2,)):
            for part in parts:
                pair.engine.backward(pair.engine(batch(rank, part)))
            pair.plain_play(_backwards(1, *parts), one_window=True)
            for name, param in pair.engine.module.named_parameters():
                read = deepspeed.utils.safe_get_full_grad(param)
                wanted = pair.plain.get_parameter(name).grad
                faults += [] if torch.equal(read, wanted) else [f"{name} after {parts}"]
    pair.close()
    return faults


@EACH_STAGE
def test_gradients_that_are_read_in_a_window(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_read_in_a_window, stage) == [[], []]


# ---- torch.func
def _functional(rank: int, world: int, stage: int) -> list[str]:
    """Transforms over the engine itself: nothing is divided, and a backward afterwards is."""
    pair = Pair(rank, world, config(stage, 4), _branches)
    x = inputs(rank, needs_grad=False)

    def asked(model: Any) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return model(x).square().sum()

        return [
            torch.func.grad(loss)(x),
            *torch.func.grad_and_value(loss)(x),
            torch.func.vmap(torch.func.grad(loss))(x),
        ]

    found = zip(asked(pair.engine), asked(pair.plain), strict=True)
    wrong = [str(place) for place, (ours, wanted) in enumerate(found) if not torch.equal(ours, wanted)]
    pair.engine.backward(pair.engine(x).sum())
    pair.plain_play(lambda model, rank: (model(inputs(rank, needs_grad=False)).sum() / 4).backward())
    wrong += pair.wrong_grads()
    pair.close()
    return wrong


@EACH_STAGE
def test_transforms_of_the_engine(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_functional, stage) == [[], []]


# ---- leaf modules
class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, used: int = 3) -> Tensor:
        return self.last(sum(branch(x) for branch in self.branches[:used]))


def _branches() -> Branches:
    torch.manual_seed(7)
    return Branches()


def _marked() -> Branches:
    model = _branches()
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.ModuleList]) == [model.branches]
    return model


def _leaf_modules(rank: int, world: int, stage: int, window: bool) -> list[str]:
    """Marked before `initialize()`; a branch is not used, in a backward of no scalar, alone and in a window."""
    pair = Pair(rank, world, config(stage), _marked)

    def program(model: Any, rank: int) -> None:
        for part, used in enumerate((3, 2) if window else (2,)):
            out = model(inputs(rank, part), used)
            out.backward(torch.ones_like(out))

    if window:
        with pair.engine.coalesce_grad_reduction():
            program(pair.engine, rank)
    else:
        program(pair.engine, rank)
    pair.plain_play(program, one_window=window)
    wrong = pair.wrong_grads()
    pair.engine.step()
    pair.plain_step()
    wrong += pair.wrong_weights()
    pair.close()
    return wrong


@EACH_STAGE
@pytest.mark.parametrize("window", (False, True))
def test_leaf_modules(ranks: Ranks, stage: int, window: bool) -> None:
    assert ranks(2).run(_leaf_modules, stage, window) == [[], []]


# ---- accumulation that is not managed
UNMANAGED: dict[str, dict[str, Any]] = {
    "offload of the optimizer": {"offload_optimizer": {"device": "cpu"}},
    "offload of both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "offload that is off": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}},
    "overlap_comm": {"overlap_comm": True},
}


def _unmanaged(rank: int, world: int, stage: int, zero: str) -> list[str]:
    """Another branch goes unused in every step, and `set_gradient_accumulation_boundary` says nothing new."""
    pair = Pair(
        rank, world, config(stage, 2, managed_gradient_accumulation=False, zero_optimization=UNMANAGED[zero]), _branches
    )
    part = 0
    for count in (2, 3, 1):
        parts = range(part, part + count)
        part += count

        def program(model: Any, rank: int, parts: range = parts, divisor: int = 1) -> None:
            for each in parts:
                (model(inputs(rank, each), 1 + each % 3).sum() / divisor).backward()

        program(pair.engine, rank)
        pair.engine.set_gradient_accumulation_boundary(True)  # refused there
        pair.engine.step()
        assert pair.engine.was_step_applied()
        pair.plain_play(lambda model, rank, program=program: program(model, rank, divisor=2))
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


@EACH_STAGE
@pytest.mark.parametrize("zero", UNMANAGED)
def test_accumulation_that_is_not_managed(ranks: Ranks, stage: int, zero: str) -> None:
    assert ranks(2).run(_unmanaged, stage, zero) == [[], []]
