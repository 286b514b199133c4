"""Pipelines over other ranks than processes: threads, with plain torch's numbers, and imagined ones, which count."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from retrograde.pipeline.payload import Payload, form_of
from retrograde.transport import FakeRanks, Parts, ThreadRanks
from tests import threads

WIDTH, ROWS, MICROBATCHES = 4, 8, 4
BLOCKS = 4


def blocks() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def piped(ranks: ThreadRanks | FakeRanks, model: list[nn.Module], schedule: str) -> rg.Pipeline:
    return rg.Pipeline(nn.Sequential(*model), schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss, mesh=ranks)


@pytest.mark.parametrize("schedule", ("gpipe", "1f1b", "zb-h1"))
def test_threads(schedule: str) -> None:
    """Models are made before threads begin: random numbers are the process's."""
    plain, (x, y) = nn.Sequential(*blocks()), data()
    models = [copy.deepcopy(plain) for _ in range(2)]
    shares = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    losses = [F.mse_loss(plain(part), wanted) / MICROBATCHES for part, wanted in shares]
    for loss in losses:
        loss.backward()

    def program(ranks: ThreadRanks) -> tuple[float, dict[str, Tensor | None]]:
        pipe = piped(ranks, list(models[ranks.rank]), schedule)
        loss = pipe.step(x, target=y)
        return float(loss), {name: param.grad for name, param in pipe.named_parameters()}

    first, second = threads.run(2, program)
    assert first[0] == second[0] == float(sum(loss.detach() for loss in losses))
    found = first[1] | second[1]
    assert {name for name, _ in plain.named_parameters()} == set(found)
    for name, param in plain.named_parameters():
        grad = found[name]
        assert grad is not None and param.grad is not None and torch.equal(grad, param.grad), name


def test_a_failure_on_one_thread_is_told_to_all() -> None:
    made = [blocks(), blocks()]

    def program(ranks: ThreadRanks) -> str:
        pipe = piped(ranks, made[ranks.rank], "1f1b")
        with pytest.raises(rg.PipelineError) as caught:
            pipe.step(torch.ones(ROWS, WIDTH + 1), target=torch.ones(ROWS, WIDTH))
        return str(caught.value)

    first, second = threads.run(2, program)
    assert first == second and first.startswith("rank 0, stage 0, microbatch 0")


# ---- imagined ranks
def counted(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of a step: calls and bytes of this rank's channel."""
    sample = Payload.of(torch.zeros(ROWS // MICROBATCHES, WIDTH, requires_grad=True))
    ranks = FakeRanks(world, rank, brings=Parts(form_of(sample), sample.tensors))
    pipe = piped(ranks, blocks(), "1f1b")
    x, y = data()
    pipe.run(x, target=y)
    (channel,) = ranks.channels
    return dict(channel.calls), dict(channel.nbytes)


@pytest.mark.parametrize(("rank", "ways"), ((0, 1), (1, 2), (2, 2), (3, 1)))
def test_imagined_ranks_count(rank: int, ways: int) -> None:
    """Each way to a neighbour has an output and its gradient, for every microbatch."""
    calls, nbytes = counted(rank, world=4)
    assert calls == {"send": ways * MICROBATCHES, "receive": ways * MICROBATCHES}
    assert nbytes == dict.fromkeys(("send", "receive"), ways * ROWS * WIDTH * 4)


def test_what_imagined_ranks_bring_must_be_said() -> None:
    pipe = piped(FakeRanks(2, rank=1), blocks(), "1f1b")
    x, y = data()
    with pytest.raises(
        rg.PipelineError, match=r"waits for the output of stage 0, .* give FakeRanks\(..., brings=...\)"
    ):
        pipe.run(x, target=y)


def test_replicas_are_processes() -> None:
    with pytest.raises(rg.PipelineError, match=r"zero=\.\.\. needs ranks that are processes"):
        rg.Pipeline(nn.Sequential(*blocks()), schedule="1f1b", microbatches=2, mesh=FakeRanks(2), zero=rg.Zero(stage=2))
