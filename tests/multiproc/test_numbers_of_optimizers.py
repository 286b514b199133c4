"""What optimizers keep for a parameter without dimensions: its one element is one rank's, and numbers about the
parameter (how often it was updated, a product of momenta) are on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import ASGD, Adam, NAdam, Optimizer

import retrograde as rg
from retrograde.transport import ThreadRanks
from tests import threads
from tests.harness import Ranks
from tests.multiproc.files import through_a_file
from tests.stages import EACH_STAGE
from tests.transport.chains import sharded

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
KINDS = {kind.__name__: kind for kind in (NAdam, ASGD, Adam)}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


class Scaled(nn.Module):
    def __init__(self, dimensions: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).requires_grad_(dimensions)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.shift


def steps(model: nn.Module, optimizer: Optimizer, count: int = 2) -> list[Tensor]:
    for _ in range(count):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def make(kind: str, params: Iterable[nn.Parameter]) -> Optimizer:
    return KINDS[kind]([param for param in params if param.requires_grad], lr=2**-6)


def stepping_on(ranks: ThreadRanks, model: Scaled, stage: int, kind: str) -> list[Tensor]:
    sharded(ranks, model, stage=stage)
    optimizer = make(kind, model.parameters())
    steps(model, optimizer)
    other = make(kind, model.parameters())
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    return steps(model, other)


def from_a_plain_run(ranks: ThreadRanks, model: Scaled, stage: int, kind: str) -> list[Tensor]:
    plain = copy.deepcopy(model)  # not made here: random numbers are the process's
    optimizer = make(kind, plain.parameters())
    steps(plain, optimizer)
    model.load_state_dict(plain.state_dict())
    sharded(ranks, model, stage=stage)
    other = make(kind, model.parameters())
    other.load_state_dict(optimizer.state_dict())
    return steps(model, other)


def sharded_between_steps(ranks: ThreadRanks, model: Scaled, stage: int, kind: str) -> list[Tensor]:
    optimizer = make(kind, model.parameters())
    steps(model, optimizer)
    sharded(ranks, model, stage=stage)
    return steps(model, optimizer)


WAYS = (stepping_on, from_a_plain_run, sharded_between_steps)


@pytest.mark.parametrize("dimensions", (True, False), ids=("beside others", "alone"))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@EACH_KIND
@EACH_STAGE
def test_steps_are_plain_torchs(stage: int, kind: str, way: Callable[..., list[Tensor]], dimensions: bool) -> None:
    plain, *models = [Scaled(dimensions) for _ in range(3)]
    wanted = steps(plain, make(kind, plain.parameters()), 4)
    for found in threads.run(2, lambda ranks: way(ranks, models[ranks.rank], stage, kind)):
        assert all(map(torch.equal, found, wanted))


class Mu(Optimizer):
    """It names what it keeps of elements as torch names a number."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            mean = self.state[param].setdefault("mu", torch.zeros_like(param))
            param.sub_(mean.mul_(0.5).add_(param.grad), alpha=2**-6)


def test_names_tell_only_what_shapes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "Mu", lambda params, lr: rg.elementwise(Mu)(params))
    test_steps_are_plain_torchs(3, "Mu", from_a_plain_run, True)


def _checkpointed(rank: int, world: int, kind: str, path: str) -> list[Any]:
    model = Scaled()
    rg.shard(model)
    optimizer, other = make(kind, model.parameters()), make(kind, model.parameters())
    steps(model, optimizer)
    rg.save(path, model, optimizer)
    rg.load(path, model, other)
    found = [each.tolist() for each in steps(model, other)]
    dist.barrier()
    return found


@EACH_KIND
def test_checkpoints(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    plain = Scaled()
    wanted = steps(plain, make(kind, plain.parameters()), 4)
    for found in ranks(2).run(_checkpointed, kind, str(tmp_path / "saved")):
        assert all(torch.equal(torch.tensor(ours), theirs) for ours, theirs in zip(found, wanted, strict=True))
