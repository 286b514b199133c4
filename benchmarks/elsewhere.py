"""What breaks elsewhere: a few ways to use backward on DDP, FSDP2 and retrograde, each beside plain torch.

    python -m benchmarks.elsewhere          the table in README.md

Two ranks on gloo, fp32, default arguments, one backward pattern each. The reference is plain torch: the ranks' programs
one after the other in one process, gradients averaged. Each cell runs in processes of its own, so that one that hangs
or aborts says nothing about the next.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg

WORLD, WIDTH, BLOCKS, PATIENCE = 2, 8, 3, 30.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(BLOCKS))) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


class Case(NamedTuple):
    """What a pattern works with: the model as its engine wants it called, and the model inside."""

    model: nn.Module
    inside: Model
    rank: int

    def batch(self, number: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + self.rank))


# ---- the patterns
def two_losses(case: Case) -> None:
    out = case.model(case.batch(0))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def forwards_first(case: Case) -> None:
    losses = [case.model(case.batch(number)).square().mean() for number in range(2)]
    for loss in losses:
        loss.backward()


def a_block_on_one_rank(case: Case) -> None:
    order = (0, 1, 2) if case.rank == 0 else (0, 2)
    case.model(case.batch(0), order).square().mean().backward()


def another_order(case: Case) -> None:
    order = (0, 1, 2) if case.rank == 0 else (2, 1, 0)
    case.model(case.batch(0), order).square().mean().backward()


def one_backward_more(case: Case) -> None:
    for number in range(1 + case.rank):
        case.model(case.batch(number)).square().mean().backward()


def gradient_penalty(case: Case) -> None:
    x = case.batch(0).requires_grad_()
    loss = case.model(x).square().mean()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()


def autograd_grad(case: Case) -> None:
    params = list(case.inside.parameters())
    grads = torch.autograd.grad(case.model(case.batch(0)).square().mean(), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def weight_in_the_loss(case: Case) -> None:
    loss = case.model(case.batch(0)).square().mean()
    (loss + case.inside.blocks[1].linear.weight.square().sum()).backward()


PATTERNS: dict[str, Callable[[Case], None]] = {
    "two losses, two backwards over one graph": two_losses,
    "two forwards, then two backwards": forwards_first,
    "a block that only rank 0 uses": a_block_on_one_rank,
    "the same blocks in another order on each rank": another_order,
    "one backward more on rank 1": one_backward_more,
    "a gradient penalty (`create_graph=True`)": gradient_penalty,
    "`torch.autograd.grad(loss, parameters)`": autograd_grad,
    "a block's weight used in the loss": weight_in_the_loss,
}


# ---- the engines
def with_ddp(model: Model) -> tuple[nn.Module, Callable[[], list[Tensor | None]]]:
    return DistributedDataParallel(model), lambda: [p.grad for p in model.parameters()]


def with_fsdp2(model: Model) -> tuple[nn.Module, Callable[[], list[Tensor | None]]]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, lambda: [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]


def with_retrograde(model: Model) -> tuple[nn.Module, Callable[[], list[Tensor | None]]]:
    engine = rg.shard(model, stage=3, timeout=20.0)
    return model, lambda: list(engine.full_grads().values())


ENGINES = {"DDP": with_ddp, "FSDP2": with_fsdp2, "retrograde": with_retrograde}


# ---- one cell
def reference(pattern: Callable[[Case], None]) -> list[Tensor | None]:
    by_rank = []
    for rank in range(WORLD):
        model = _model()
        pattern(Case(model, model, rank))
        by_rank.append([p.grad for p in model.parameters()])
    found: list[Tensor | None] = []
    for grads in zip(*by_rank, strict=True):
        present = [grad for grad in grads if grad is not None]
        found.append(torch.stack(present).sum(0) / WORLD if present else None)
    return found


def _model() -> Model:
    torch.manual_seed(1)
    return Model()


def _rank(rank: int, store: str, engine: str, pattern: str, answers: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    inside = _model()
    try:
        model, grads = ENGINES[engine](inside)
        PATTERNS[pattern](Case(model, inside, rank))
        found = grads()
    except Exception as error:
        answers.put(f"raises {type(error).__name__}")
        answers.close()
        answers.join_thread()
        os._exit(0)
    wanted = reference(PATTERNS[pattern])
    answers.put("=" if all(map(_close, found, wanted)) else "wrong")
    answers.close()
    answers.join_thread()
    time.sleep(1.0)  # others may still read from this rank
    os._exit(0)


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def cell(engine: str, pattern: str) -> str:
    """`=`: right up to rounding on both ranks. Else the worst that a rank says."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", engine, pattern, answers)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        said = []
        try:
            for _ in ranks:
                said.append(answers.get(timeout=PATIENCE))
        except queue.Empty:
            said.append("hangs" if any(rank.is_alive() for rank in ranks) else "aborts")
        for rank in ranks:
            rank.kill()
            rank.join()
    worst = [word for word in said if word != "="]
    return "wrong" if "wrong" in worst else (worst[0] if worst else "=")


def main() -> None:
    torch.set_num_threads(1)
    print("| pattern | " + " | ".join(ENGINES) + " |")
    print("|---|" + "---|" * len(ENGINES))
    for pattern in PATTERNS:
        print(f"| {pattern} | " + " | ".join(cell(engine, pattern) for engine in ENGINES) + " |", flush=True)


if __name__ == "__main__":
    main()
