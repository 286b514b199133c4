"""After I a stage holds what W reads and nothing else; after W nothing: for the blocks that people train.

What is alive is counted by storage, at every operation. Between I and W that must be the pairs, byte for byte, and W
must read every one of them."""

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.live import Live
from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters
from retrograde.torch_internals import check_before_first_use
from tests.pipeline.architectures import ARCHITECTURES, BATCH, HEADS, TOKENS, WIDTH, input_of

CHECKPOINTS = {"none": None, "reentrant": True, "other": False}


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def settled(live: Live, model: nn.Module) -> int:
    gc.collect()
    live.ignore(*(p.grad for p in model.parameters()))
    return live.bytes()


def lowered(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext()


def bytes_between(model: nn.Module, x: Tensor, lower: bool) -> int:
    """What is alive between I and W beyond the input and the output's gradient, which are the transport's."""
    check_before_first_use()  # which makes a tensor to know autocast's regions by
    split = SplitBackward(StageParameters(model))
    x.requires_grad_()
    with torch.no_grad(), lowered(lower):
        grad = torch.ones_like(model(x))
    with Live() as live:
        live.ignore(*model.parameters(), *model.buffers(), x.detach(), grad)
        with split.recording(), lowered(lower):
            outputs = [model(x)]
        split.run_inputs([outputs.pop()], [grad])
        x.grad = None
        between = settled(live, model)
        waiting = live.alive()
        live.read = set()
        split.run_weights()
        unread = [storage for storage in waiting if storage not in live.read]
        assert unread == []
        assert settled(live, model) == 0
    return between


# Floats of one token that the linear layers of a block read in W: inputs, each once, and gradients of outputs.
LLAMA = (WIDTH + WIDTH + WIDTH + 3 * WIDTH) + (WIDTH + 2 * WIDTH // 2 + WIDTH + 3 * WIDTH + 3 * WIDTH + WIDTH)
GPT2 = (WIDTH + WIDTH + WIDTH + 4 * WIDTH) + (3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH)
T5 = (4 * WIDTH + 1 * WIDTH + WIDTH + 2 * WIDTH) + (8 * WIDTH + 2 * WIDTH + 2 * WIDTH + WIDTH)
# The gradient of the output is the transport's; the last layer of each block reads it.
READ = {"Llama": LLAMA - WIDTH, "GPT-2": GPT2 - WIDTH, "T5": T5 - WIDTH}


@pytest.mark.parametrize("recompute", CHECKPOINTS)
@pytest.mark.parametrize("name", READ)
def test_between_i_and_w(name: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = Recomputed(ARCHITECTURES[name](), CHECKPOINTS[recompute])
    expected = 4 * BATCH * TOKENS * READ[name]
    if name == "T5":  # the embedding of distances: its indices, and the gradient of what it made
        expected += 8 * TOKENS**2 + 4 * TOKENS**2 * HEADS
    assert bytes_between(model, input_of(name), lower=False) == expected


@pytest.mark.parametrize(
    ("name", "recompute"), [("Llama", "none"), ("GPT-2", "reentrant"), ("ViT", "none"), ("T5", "other")]
)
def test_nothing_else_under_autocast(name: str, recompute: str) -> None:
    """W reads every storage that is alive, and none of them is as large as a float for each element."""
    torch.manual_seed(0)
    model = Recomputed(ARCHITECTURES[name](), CHECKPOINTS[recompute])
    full = bytes_between(model, input_of(name), lower=False)
    model.zero_grad()
    assert bytes_between(model, input_of(name), lower=True) < 0.75 * full
