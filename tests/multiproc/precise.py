"""A sharded model with masters beside plain torch: a model that computes, and one in fp32 that is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.layout import Precision
from tests.multiproc.twin import Twin
from tests.reference import Program, Rounding, play
from tests.small import build


def computing(model: nn.Module, precision: Precision) -> nn.Module:
    """A plain model as users would make it of `model`: its parameters cast, and modules that are kept cast around."""
    for module in model.modules():
        if precision.keeps(module):
            module.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
            module.register_forward_hook(lambda module, args, out: out.to(precision.page))
        else:
            for param in module.parameters(recurse=False):
                param.data = param.data.to(precision.page)
    return model


class PreciseTwin(Twin):
    """`plain` has the masters; `low` computes."""

    def __init__(
        self,
        rank: int,
        world: int,
        stage: int,
        precision: Precision | str = "bf16",
        make: Callable[[], nn.Module] = build,
        **options: Any,
    ) -> None:
        self.precision = Precision.of(precision)
        super().__init__(rank, world, stage, make, precision=precision, **options)
        self.plain.to(self.precision.dtypes(torch.float32).master)
        self.low = computing(make(), self.precision)
        self.rounding = Rounding(self.precision.waiting, self.precision.wire)

    def plain_play(self, program: Program) -> None:
        play(self.low, self.world, program, self.stage, self.replicas, self.plain, self.rounding)

    def step(self) -> None:
        super().step()
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """What computes gets the masters' values."""
        for name, param in self.low.named_parameters():
            param.copy_(self.plain.get_parameter(name))

    def check(self) -> None:
        super().check()
        self.check_pages()

    def check_pages(self) -> None:
        with torch.no_grad():
            wrong = [name for name, param in self.low.named_parameters() if not _same(self.page(name), param)]
        assert not wrong, f"rank {self.rank}: pages differ from plain torch in {wrong}"

    def page(self, name: str) -> Tensor:
        """What modules compute with."""
        owner, _, attribute = name.rpartition(".")
        shown: Tensor = getattr(self.model.get_submodule(owner), attribute)
        return shown.detach()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


FULL = rg.Precision(param="bf16", reduce="fp32", master="fp32", accumulate="fp32")
