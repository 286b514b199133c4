"""What people do to a model once it is sharded: initialize it again, flatten it, parametrize it, copy it, export it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, sgd, trained
from tests.stages import ALONE_OR_NOT, EACH_STAGE


# ---- initializing
def in_the_usual_loop(model: nn.Module, loss: Loss) -> None:
    torch.manual_seed(7)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.xavier_uniform_(param)
    trained(model, loss)


def by_the_parameter(model: nn.Module, loss: Loss) -> None:
    """One rank has nothing of the last ones; all draw."""
    torch.manual_seed(7)
    first, second, third = (param for param in model.parameters() if param.dim() > 1)
    nn.init.kaiming_normal_(third, nonlinearity="relu")
    nn.init.orthogonal_(first, gain=2.0)
    nn.init.sparse_(second, 0.25)
    nn.init.xavier_normal_(third)
    nn.init.eye_(first)
    nn.init.xavier_normal_(second)
    nn.init.trunc_normal_(third, std=0.02)
    nn.init.kaiming_uniform_(first, a=5**0.5)
    assert nn.init.xavier_uniform_(second) is second


def by_the_module(model: nn.Module, loss: Loss) -> None:
    torch.manual_seed(7)
    nn.init.orthogonal_(model[0][0].weight)
    nn.init.eye_(model[1][0].weight)
    nn.init.xavier_normal_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.sparse_(module.weight, 0.5)
    loss().backward()


def reset_by_torch(model: nn.Module, loss: Loss) -> None:
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    trained(model, loss)


# ---- vectors
def vector_and_back(model: nn.Module, loss: Loss) -> Tensor:
    with torch.no_grad():
        vector = parameters_to_vector(model.parameters())
        norm = vector.norm()
        vector_to_parameters(vector * 0.5, model.parameters())
    trained(model, loss)
    return norm


def vector_with_a_graph_and_back(model: nn.Module, loss: Loss) -> Tensor:
    """Outside of no_grad the vector is part of a graph."""
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.detach() * 2, model.parameters())
    trained(model, loss)
    return vector.detach()


def vector_in_a_loss(model: nn.Module, loss: Loss) -> Tensor:
    penalty = parameters_to_vector(model.parameters()).pow(2).sum()
    (loss() + penalty).backward()
    return penalty.detach()


# ---- editing
def held_while_another_changes(model: nn.Module, loss: Loss) -> None:
    """A full tensor is edited by a function, while the page has old values of another parameter."""
    held = model[1][0].weight
    dist.barrier()  # such an edit does not wait for ranks that read
    with torch.no_grad():
        model.get_parameter("1.0.bias").mul_(2)
        torch._foreach_mul_([held], 2)
    trained(model, loss)


# ---- other parameters
def old_weight_norm(model: nn.Module, loss: Loss) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[1][0])
    trained(model, loss)
    return [name for name, _ in model.named_parameters()]


def pruned(model: nn.Module, loss: Loss) -> list[str]:
    prune.l1_unstructured(model[1][0], "weight", 0.5)
    trained(model, loss)
    return list(model.state_dict())


IDIOMS = [
    in_the_usual_loop,
    by_the_parameter,
    by_the_module,
    reset_by_torch,
    vector_and_back,
    vector_with_a_graph_and_back,
    vector_in_a_loss,
    held_while_another_changes,
    old_weight_norm,
    pruned,
]


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = x.abs().mul(3).long() % self.embed.num_embeddings
        return self.head(self.middle(self.embed(ids)).tanh())


def resized_embedding(model: nn.Module, loss: Loss) -> list[tuple[str, torch.Size]]:
    """As transformers' resize_token_embeddings: a new module with the old rows, tied again."""
    loss().backward()
    sgd(model).step()
    model.zero_grad()
    torch.manual_seed(3)
    old, new = model.embed, nn.Embedding(12, 8)
    new.weight.data[:10] = old.weight.data[:10]
    model.embed = new
    model.head.weight = model.embed.weight
    trained(model, loss)
    return [(name, value.shape) for name, value in model.state_dict().items()]


def grown_weight(model: nn.Module, loss: Loss) -> list[tuple[str, torch.Size]]:
    """In the same module."""
    rows = torch.ones(2, 8)
    model.embed.weight = nn.Parameter(torch.cat([model.embed.weight.data, rows]))
    model.embed.num_embeddings = 12
    model.head.weight = model.embed.weight
    trained(model, loss)
    return [(name, value.shape) for name, value in model.state_dict().items()]


@EACH_STAGE
@pytest.mark.parametrize("idiom", (resized_embedding, grown_weight), ids=lambda idiom: idiom.__name__)
def test_another_embedding(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, Tied) == ["", ""]


# ---- refused, in words that say what to do
REFUSED: dict[str, tuple[Callable[[nn.Module], Any], tuple[str, ...]]] = {
    "weight_norm": (
        lambda model: nn.utils.parametrizations.weight_norm(model[1][0]),
        ("parametrizing parameter 1.0.weight", "before rg.shard()"),
    ),
    "spectral_norm": (
        lambda model: nn.utils.parametrizations.spectral_norm(model[1][0]),
        ("parametrizing parameter 1.0.weight", "before rg.shard()"),
    ),
    "deepcopy of a part": (lambda model: copy.deepcopy(model[1]), ("part of a sharded model", "Copy the whole model")),
}


def _refused(rank: int, world: int, name: str) -> str:
    model, plain = net(), net()
    rg.shard(model, 3)
    do, _ = REFUSED[name]
    with pytest.raises(rg.UnsupportedError) as refused:
        do(model)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    model(batch(rank)).sum().backward()  # goes on
    sgd(model).step()
    dist.barrier()
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks: Ranks, name: str) -> None:
    for said in ranks(2).run(_refused, name):
        assert all(words in said for words in REFUSED[name][1]), said


def _exported(rank: int, world: int, strict: bool) -> str:
    model, plain = net(), net()
    rg.shard(model, 3)
    with pytest.raises(Exception) as refused:
        torch.export.export(model, (batch(0),), strict=strict)
    for each in (model, plain):
        trained(each, lambda step, each=each: each(batch(0, step)).pow(2).mean())
    assert torch.equal(model(batch(1)), plain(batch(1)))
    dist.barrier()
    return str(refused.value)


@pytest.mark.parametrize("strict", (False, True))
@ALONE_OR_NOT
def test_export_is_refused_and_leaves_the_model_as_it_was(ranks: Ranks, world: int, strict: bool) -> None:
    for said in ranks(world).run(_exported, strict):
        if strict:  # torch's own words: it finds a function that is not to be traced
            assert "Skip inlining" in said
        else:
            assert "torch.export of a sharded model" in said and "export that" in said
