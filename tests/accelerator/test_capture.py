"""A stream that is being captured into a graph: what a graph would not play again is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from tests.accelerator import device
from tests.accelerator.ranks import each_case
from tests.accelerator.training import build
from tests.harness import Ranks
from tests.patterns.models import SPECS

WORLD = 2
REPLAYED = "when the graph is replayed, nothing would be fetched, reduced or agreed on"
FIX = "Leave what uses sharded weights out of the graph"

Use = Callable[[], object]


class _Case:
    """A model on which everything has been done once, so that nothing is left to be prepared."""

    def __init__(self, rank: int) -> None:
        self.where = device.of_rank(rank)
        self.model = build("mlp", self.where)
        self.engine = rg.shard(self.model, stage=3, timeout=20.0, precision=rg.Precision(param="bf16"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = [tensor.to(self.where) for tensor in SPECS["mlp"].batch(rank, 0)]
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        x, y = self.batch
        return SPECS["mlp"].loss(self.model(x), y)


def weights(case: _Case) -> Iterator[tuple[Use, str]]:
    first = next(iter(case.model.named_modules(prefix="")))[1]
    yield lambda: first(case.batch[0]), "its weights are used"
    layer = next(module for module in case.model.modules() if isinstance(module, nn.Linear))
    _ = layer.weight  # a page that is there is no reason either: the graph would have its address
    yield lambda: layer.weight, "its weights are used"


def masters(case: _Case) -> Iterator[tuple[Use, str]]:
    yield case.model.state_dict, "its masters are read"


def gradients(case: _Case) -> Iterator[tuple[Use, str]]:
    loss = sum(param.float().sum() for param in (module.weight for module in _layers(case)))
    assert isinstance(loss, torch.Tensor)
    yield loss.backward, "its gradients are collected"


def steps(case: _Case) -> Iterator[tuple[Use, str]]:
    case.loss().backward()
    yield case.optimizer.step, "an optimizer step (step 2): ranks meet"


def values(case: _Case) -> Iterator[tuple[Use, str]]:
    case.loss().backward()
    yield lambda: case.engine.clip_grad_norm_(1.0), "ranks meet"


def edits(case: _Case) -> Iterator[tuple[Use, str]]:
    param = next(case.model.parameters())

    def edit() -> None:
        with torch.no_grad():
            param.mul_(2)

    yield edit, "a sharded parameter is written to"


def _layers(case: _Case) -> list[nn.Linear]:
    return [module for module in case.model.modules() if isinstance(module, nn.Linear)]


def _refused(rank: int, world: int, case: Callable[[_Case], Iterator[tuple[Use, str]]]) -> list[tuple[str, str]]:
    found = []
    made = _Case(rank)
    with device.use("eager"):
        for use, cause in case(made):
            dist.barrier()
            with device.capturing(), pytest.raises(rg.UnsupportedError) as refused:
                use()
            found.append((str(refused.value), cause))
            use() if case is not gradients else None  # outside of a capture it is as it was
    dist.barrier()
    return found


@each_case(weights, masters, gradients, steps, values, edits)
def test_what_a_graph_would_not_play_again(late_ranks: Ranks, case: Callable[..., Iterator[tuple[Use, str]]]) -> None:
    for rank, found in enumerate(late_ranks(WORLD).run(_refused, case)):
        assert found
        for text, cause in found:
            assert f"{cause} while the current stream of late:{rank} is being captured into a graph" in text
            assert REPLAYED in text
            assert FIX in text


def _plain(rank: int, world: int) -> list[float]:
    case = _Case(rank)
    with device.use("eager"), device.capturing():
        return (case.batch[0] * 0 + 1).mean(0).tolist()[:1]


def test_what_is_not_sharded_may_be_captured(late_ranks: Ranks) -> None:
    assert late_ranks(WORLD).run(_plain) == [[1.0]] * WORLD
