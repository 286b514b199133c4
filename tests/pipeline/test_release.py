"""Live bytes after every action of a rank, as arithmetic over the shapes.

One rank of a pipeline runs alone, with a transport that has every message ready and completes every send at once;
then real ranks, of which nothing may be left when a step has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from zmq.utils import garbage

import retrograde as rg
from benchmarks.live import Live
from benchmarks.stage_blocks import BATCH, TOKENS, WIDTH, stage
from retrograde.pipeline import Action, ActionKind, generate, lower
from retrograde.pipeline.executor import Batch, Executor
from retrograde.pipeline.payload import Payload
from retrograde.pipeline.stage import Stage, WeightedTarget
from retrograde.transport.channel import ConnectedChannel
from retrograde.transport.messages import Address
from tests.harness import RankPool
from tests.live import live_storages
from tests.pipeline.bytes_of_blocks import BLOCKS, PAIRS, TOKEN_WISE, saved

RANKS, MICROBATCHES = 3, 5
PASSED = TOKEN_WISE  # what goes from stage to stage, forward or backward
NUMBER = 4  # one float


@dataclass
class Ready:
    """A message that is there when it is waited for; its buffer exists since it was posted."""

    content: Any

    def __call__(self) -> Any:
        content, self.content = self.content, None
        return content


class Alone:
    """Both neighbours of a rank."""

    def send(self, peer: int, address: Address, content: Any) -> None:
        pass

    def send_void(self, peer: int, address: Address) -> None:
        raise AssertionError("the rank failed")

    def receive(self, peer: int, address: Address) -> Ready:
        tensor = torch.randn(BATCH, TOKENS, WIDTH)
        if not address.forward:
            return Ready([tensor])
        layout = Payload.of(tensor.detach().requires_grad_()).layout
        return Ready(Payload(layout, [tensor]))


class Book:
    """What should be alive, from the actions so far."""

    def __init__(self, rank: int, kind: str, recompute: str | None) -> None:
        first, last = rank == 0, rank == RANKS - 1
        # Between F and I: what the graph saved, and the input unless it is the user's. The last block's output is
        # saved by the loss only; a recomputed block saves its input, which for the first one is counted as such.
        self.flight = saved(kind, recompute) - TOKEN_WISE + (0 if first else PASSED) + (PASSED if last else 0)
        self.pairs = BLOCKS * PAIRS
        # Of a checkpointed stage one microbatch has pairs; of others its input and the gradient of its output wait.
        # torch's reentrant checkpoint runs a backward of its own, which cannot be repeated.
        self.input_and_grad = PASSED + (NUMBER if last else PASSED)
        self.repeats = recompute == "other" and not first
        self.waiting: dict[int, int] = {}  # bytes between I and W, by microbatch
        self.first, self.last = first, last
        self.total = 0

    def note(self, action: Action) -> int:
        if action.kind is ActionKind.I:
            apart = self.repeats and self.pairs in self.waiting.values()
            self.waiting[action.microbatch] = self.input_and_grad if apart else self.pairs
        waiting = self.waiting.get(action.microbatch, 0)
        grows = {
            ActionKind.RECV_F: PASSED,
            ActionKind.F: self.flight - (0 if self.first else PASSED) + (2 * NUMBER if self.last else PASSED),
            ActionKind.SEND_F: -PASSED,
            ActionKind.RECV_B: PASSED,
            # The gradient's buffer becomes part of the last pair; on the last stage the weight of the loss goes.
            ActionKind.I: waiting - self.flight - (NUMBER if self.last else PASSED) + (0 if self.first else PASSED),
            ActionKind.B: -self.flight - (NUMBER if self.last else PASSED) + (0 if self.first else PASSED),
            ActionKind.SEND_B: -PASSED,
            ActionKind.W: -waiting,
            ActionKind.REDUCE: 0,
        }
        self.total += grows[action.kind]
        if action.kind is ActionKind.W:
            del self.waiting[action.microbatch]
        return self.total


def run(schedule: str, rank: int, kind: str, recompute: str | None) -> tuple[list[str], int]:
    module = stage(kind, recompute)
    plan = lower(generate(schedule, RANKS, MICROBATCHES))
    loss = F.mse_loss if rank == RANKS - 1 else None
    one = Stage(rank, module, loss, plan.split_microbatches(rank))
    batch = Batch(
        [torch.randn(BATCH, TOKENS, WIDTH) for _ in range(MICROBATCHES)],
        [1 / MICROBATCHES] * MICROBATCHES,
        [{}] * MICROBATCHES,
        [WeightedTarget(torch.randn(BATCH, TOKENS, WIDTH), 1 / MICROBATCHES) for _ in range(MICROBATCHES)],
    )
    book, wrong = Book(rank, kind, recompute), []
    with Live() as live:
        live.ignore(*module.parameters(), *batch.inputs, *(target.value for target in batch.targets))

        def watch(action: Action) -> None:
            live.ignore(*(p.grad for p in module.parameters()))
            expected, found = book.note(action), live.bytes()
            if found != expected:
                wrong.append(f"{action}: {found} bytes alive, expected {expected} ({found - expected:+})")

        outcome = Executor(plan, rank, {rank: one}, Alone(), watch).run(batch)
        assert outcome.error is None, outcome.error
        del outcome
        return wrong, live.bytes()


# torch's reentrant checkpoint computes no gradients if no input needs one, so not on the first rank
PLACES = [(r, c) for r in range(RANKS) for c in (None, "other", "reentrant") if (r, c) != (0, "reentrant")]


@pytest.mark.parametrize(("rank", "recompute"), PLACES)
@pytest.mark.parametrize("kind", ["plain", "sdpa"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_live_bytes_after_every_action(schedule: str, rank: int, kind: str, recompute: str | None) -> None:
    wrong, left = run(schedule, rank, kind, recompute)
    assert wrong == []
    assert left == 0


def test_outputs_and_losses_are_detached() -> None:
    one = Stage(0, stage(), F.mse_loss, split={0})
    x = torch.randn(BATCH, TOKENS, WIDTH)
    loss, output = one.forward_last(0, Payload.of(x), {}, WeightedTarget(torch.zeros_like(x), 1.0))
    assert loss is not None and loss.value.grad_fn is None and not loss.value.requires_grad
    assert output.grad_fn is None and not output.requires_grad


AGREED = 24  # bytes: three numbers for each rank at the end of a step, which gloo's thread may let go of a little later


def between_ranks(rank: int, world: int, schedule: str) -> dict[str, Any]:
    """Real ranks and connections: what is alive after each step, and what the connections still hold."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    pipe = rg.Pipeline(blocks, schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    x = torch.randn(MICROBATCHES * BATCH, TOKENS, WIDTH)
    channel = cast(ConnectedChannel, pipe._transport.channel)
    pipe.step(x, target=x)  # gradients exist from here on
    dist.barrier()
    before, alive, unsent = live_storages(), [], []
    for _ in range(3):
        pipe.step(x, target=x)
        dist.barrier()
        alive.append({at: n for at, n in live_storages().items() if at not in before and n != AGREED})
        unsent.append(len(garbage.gc.refs))
        dist.barrier()
    waiting = len(channel._arrived) + len(channel._filling)
    grads = all(p.grad is not None for p in pipe.parameters())
    return {"alive": alive, "unsent": unsent, "waiting": waiting, "grads": grads}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_nothing_is_left_between_ranks(ranks: Callable[[int], RankPool], schedule: str) -> None:
    """Sent and received tensors are gone when the step has ended, on every rank."""
    for seen in ranks(2).run(between_ranks, schedule):
        assert seen["grads"]
        assert seen["alive"] == [{}, {}, {}] and seen["unsent"] == [0, 0, 0] and seen["waiting"] == 0
