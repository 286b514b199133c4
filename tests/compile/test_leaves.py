"""Sharded parameters and gradients in functions that are compiled: graphs end there, and the results are torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, both, net, weight
from tests.stages import OPPOSITE_STAGES


def _stepped(model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in range(2):
        optimizer.zero_grad()
        loss(number).backward()
        step()


def compiled_adamw(model: nn.Module, loss: Loss) -> None:
    _stepped(model, loss, torch.optim.AdamW(model.parameters(), lr=2**-4))


def compiled_sgd(model: nn.Module, loss: Loss) -> None:
    _stepped(model, loss, torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5))


def compiled_functions(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()

    @torch.compile(backend="aot_eager")
    def doubled(grad: Tensor) -> Tensor:
        return (grad * 2 + 1)[0]

    @torch.compile(backend="aot_eager")
    def penalty(params: Iterable[Any]) -> Tensor:
        return sum(param.pow(2).sum() for param in params)

    value = penalty(list(model.parameters()))
    value.backward()
    return torch.cat([doubled(weight(model).grad), value.detach().view(1)])


@OPPOSITE_STAGES
@pytest.mark.parametrize("idiom", (compiled_adamw, compiled_sgd, compiled_functions), ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]
