"""Pipelines with masters under them, beside plain torch: a model that computes, and one in fp32 that is trained."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from retrograde.layout import Precision
from retrograde.pipeline.account import share_of
from tests.harness import Ranks
from tests.multiproc.precise import computing
from tests.pipeline.architectures import ARCHITECTURES, input_of
from tests.pipeline.cases import CASES, Case, Data, backward_order, plain_step, reductions
from tests.reference import Contribution, Grads, Recorder, Rounding, mean

MICROBATCHES = 4
PLAIN = rg.Precision(param="bf16", output="fp32")
PRECISIONS = {
    "bf16": PLAIN,
    "fp32 waits": rg.Precision(param="bf16", accumulate="fp32", output="fp32"),
    "fp32 waits, bf16 travels": rg.Precision(param="bf16", accumulate="fp32", reduce="bf16", output="fp32"),
    "norms kept": rg.Precision(param="bf16", accumulate="fp32", keep=nn.LayerNorm, output="fp32"),
}


@dataclass
class Plain:
    """`trained` has the masters, `low` computes. In `low` the two uses of a tied weight are two weights: stages add up
    their own uses first, over all microbatches, and then each other's."""

    case: Case
    precision: Precision
    trained: nn.ModuleList

    def __post_init__(self) -> None:
        parts = [copy.deepcopy(block) for block in self.trained]
        self.low = computing(nn.ModuleList(parts), self.precision)
        self.optimizer = torch.optim.SGD(self.trained.parameters(), lr=0.1)
        self._uses: dict[int, list[str]] = {}
        for name, parameter in self.trained.named_parameters(remove_duplicate=False):
            self._uses.setdefault(id(parameter), []).append(name)

    def step(self, order: Sequence[int], replicas: int, seed: int) -> Grads:
        by_replica = [self._left(order, seed + replica) for replica in range(replicas)]
        found = {name: mean([grads[name] for grads in by_replica], replicas) for name in by_replica[0]}
        for name, parameter in self.trained.named_parameters(remove_duplicate=False):
            parameter.grad = found[name]
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.low.named_parameters():
                parameter.copy_(self.trained.get_parameter(name))
        return found

    def _left(self, order: Sequence[int], seed: int) -> Grads:
        """What one replica sends of each parameter."""
        torch.manual_seed(seed)
        args, target, options = self.case.data()
        data = Data(lowered(args), target, lowered(options))
        self.low.zero_grad()
        with contextlib.closing(Recorder(self.low)) as recorder:
            plain_step(list(self.low), data, lambda out, y: self.case.loss(out.float(), y), order)
        found: Grads = {}
        for names in self._uses.values():
            sums = [self._sum(recorder, name) for name in names]
            total = self._sent([each for each in sums if each is not None])
            found.update(dict.fromkeys(names, total))
        return found

    def _sum(self, recorder: Recorder, name: str) -> Tensor | None:
        grads = [entry.grad for entry in recorder.timelines[name] if isinstance(entry, Contribution)]
        total = Rounding(self.precision.waiting).sent(grads, torch.float32)
        return None if total is None else total.to(self.precision.waiting or grads[0].dtype)

    def _sent(self, sums: list[Tensor]) -> Tensor | None:
        return Rounding(None, self.precision.wire).sent(sums, torch.float32)


def lowered(tree: object) -> object:
    if isinstance(tree, Tensor):
        return tree.bfloat16() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: lowered(value) for key, value in tree.items()}
    return tuple(map(lowered, tree)) if isinstance(tree, tuple) else tree


def steps(rank: int, world: int, schedule: str, stage: int, names: list[str], precision: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pp", "dp"))
    wrong = []
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        plain = Plain(case, PRECISIONS[precision], nn.ModuleList(case.blocks()))
        zero = rg.Zero(stage=stage, mesh=mesh["dp"], precision=PRECISIONS[precision])
        pipe = rg.Pipeline(
            copy.deepcopy(plain.trained),
            schedule=schedule,
            microbatches=MICROBATCHES,
            loss=case.loss,
            mesh=mesh["pp"],
            zero=zero,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for number in range(2):
            wanted = plain.step(backward_order(pipe.schedule), 2, 10 * number)
            torch.manual_seed(10 * number + mesh["dp"].get_local_rank())
            data = case.data()
            pipe.engine.ledger.clear()
            pipe.step(*copy.deepcopy(data.args), target=data.target, **data.options)
            found = [*different(pipe, wanted), *reductions(pipe)]
            wrong += [f"{name}, step {number}: {text}" for text in found]
            optimizer.step()
            optimizer.zero_grad()
    return wrong


def different(pipe: rg.Pipeline, wanted: Grads) -> list[str]:
    wrong = []
    for name, leaf in pipe.named_parameters():
        whole, reference = pipe.engine.full_grad(leaf), wanted.get(name)
        if (whole is None) != (reference is None):
            wrong.append(f"{name} has gradient {whole is not None}, torch {reference is not None}")
        elif whole is not None and not (whole.dtype == reference.dtype and torch.equal(whole, reference)):
            wrong.append(f"{name} differs by {(whole - reference).abs().max()}")
    return wrong


NAMES = [
    "transformer",
    "checkpoint",
    "reentrant checkpoint",
    "trees",
    "outputs without gradient",
    "in place",
    "partly frozen",
    "block called twice",
    "tied at both ends",
    "tied, transposed",
    "keyword arguments",
    "attention modules",
    "GPT-2",
    "ViT",
]
NORMS = ["checkpoint", "GPT-2"]


@pytest.mark.parametrize(
    ("precision", "schedule", "stage", "names"),
    [
        ("bf16", "zb-h1", 3, NAMES[0::3]),
        ("fp32 waits", "zb-v", 2, NAMES[1::3]),
        ("fp32 waits, bf16 travels", "1f1b", 1, NAMES[2::3]),
        ("norms kept", "v-half", 3, NORMS),
    ],
)
def test_masters_are_trained_as_in_plain_torch(
    ranks: Ranks, precision: str, schedule: str, stage: int, names: list[str]
) -> None:
    found = ranks(4).run(steps, schedule, stage, names, precision, timeout=110)
    assert [text for by_rank in found for text in by_rank] == []


def shares_that_wait(rank: int, world: int, name: str, precision: str | None) -> list[float | None]:
    """Of the weight gradients' work in this rank's stages, which have pages; without a precision, in autocast."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    zero = rg.Zero(stage=3, mesh=mesh["dp"], precision=None if precision is None else PRECISIONS[precision])
    blocks = [ARCHITECTURES[name]() for _ in range(world)]
    pipe = rg.Pipeline(blocks, schedule="zb-h1", microbatches=2, loss=F.mse_loss, mesh=mesh["pp"], zero=zero)
    x = input_of(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is None):
        pipe.step(x, target=x)
    works = [list(stage.works()) for stage in pipe.stages.values()]
    assert all(any(work.flops for work in of_stage) for of_stage in works)
    return [share_of(of_stage) for of_stage in works]


@pytest.mark.parametrize(("name", "precision"), [("GPT-2", "bf16"), ("GPT-2", "norms kept"), ("Llama", None)])
def test_weight_gradients_of_pages_wait(ranks: Ranks, name: str, precision: str | None) -> None:
    """All products of these blocks, and nothing else counts."""
    assert ranks(2).run(shares_that_wait, name, precision, timeout=60) == [[1.0], [1.0]]


class Kept(nn.Linear):
    pass


def kept_on_one_stage(rank: int, world: int) -> str:
    blocks = [Kept(8, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 8)]
    blocks[3].weight = blocks[0].weight
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    zero = rg.Zero(stage=2, mesh=mesh["dp"], precision=rg.Precision(param="bf16", keep=Kept))
    with pytest.raises(rg.PipelineError) as error:
        rg.Pipeline(blocks, schedule="1f1b", microbatches=2, mesh=mesh["pp"], zero=zero)
    return str(error.value)


def test_a_tied_weight_has_one_dtype(ranks: Ranks) -> None:
    for text in ranks(2).run(kept_on_one_stage):
        assert text.startswith("parameter 0.weight is used on ranks [0, 1], by a module that precision.keep has and by")


def test_a_precision_that_is_none() -> None:
    with pytest.raises(rg.ShardingError, match=r"precision='half' is not known"):
        rg.Zero(precision="half")
