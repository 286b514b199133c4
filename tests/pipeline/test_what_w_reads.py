"""After I a stage holds what W reads and nothing else; after W nothing: for the blocks that people train.

What is alive is counted by storage, at every operation. Between I and W that must be the pairs, byte for byte, and W
must read every one of them."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.live import Live
from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters
from retrograde.torch_internals import check_before_first_use
from tests.pipeline.architectures import ARCHITECTURES, BATCH, HEADS, TOKENS, WIDTH, input_of
from tests.pipeline.halves import Apply, attention, deferred, experts, image, lin, numbers, rand, tokens

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
    x.requires_grad_(x.is_floating_point())
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
VIT = (WIDTH + WIDTH + WIDTH + 4 * WIDTH) + (3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH)
PATCHES = 4  # of a picture, and one token more
# The gradient of the output is the transport's; the last layer of each block reads it.
READ = {
    "Llama": TOKENS * (LLAMA - WIDTH),
    "GPT-2": TOKENS * (GPT2 - WIDTH),
    "T5": TOKENS * (T5 - WIDTH),
    "ViT": (1 + PATCHES) * (VIT - WIDTH) + PATCHES * WIDTH,  # and the gradient of patches; the picture is the input
}


@pytest.mark.parametrize("recompute", CHECKPOINTS)
@pytest.mark.parametrize("name", READ)
def test_between_i_and_w(name: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = Recomputed(ARCHITECTURES[name](), CHECKPOINTS[recompute])
    expected = 4 * BATCH * READ[name]
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


# ---- one block of each kind
class Kind(NamedTuple):
    """A module between two `tanh`, so that neither its input nor its output's gradient is the transport's."""

    make: Callable[[], nn.Module]
    draw: Callable[[], Tensor]
    read: int  # bytes: inputs of products, and gradients of their outputs


def between_tanhs(inner: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    return Apply(lambda m, x: torch.tanh(inner(m, torch.tanh(x))), **parts)


def compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


ROWS = 4 * 4 * 6  # bytes of one float for each token
KINDS = {
    "linear": Kind(lambda: between_tanhs(lambda m, x: m.a(x), a=lin(8, 5)), tokens, ROWS * (8 + 5)),
    "linear, compiled": Kind(lambda: compiled(between_tanhs(lambda m, x: m.a(x), a=lin(8, 5))), tokens, ROWS * (8 + 5)),
    "two of one input": Kind(
        lambda: between_tanhs(lambda m, x: m.a(x) * m.b(x), a=lin(8, 5), b=lin(8, 5)), tokens, ROWS * (8 + 2 * 5)
    ),
    "a function of the user": Kind(
        lambda: between_tanhs(lambda m, x: deferred(x, m.a.weight, m.a.bias), a=lin(8, 5)), tokens, ROWS * (8 + 5)
    ),
    "convolution": Kind(
        lambda: between_tanhs(lambda m, x: m.c(x), c=nn.Conv2d(4, 6, 3)), image, 4 * 3 * (4 * 6 * 6 + 6 * 4 * 4)
    ),
    "a matrix for each row": Kind(
        lambda: between_tanhs(lambda m, x: torch.bmm(x, m.w), w=rand(4, 8, 5)), tokens, ROWS * (8 + 5)
    ),
    # Where each expert's rows end is read too: three numbers of four bytes.
    "experts": Kind(lambda: between_tanhs(experts, w=rand(3, 8, 4)), tokens, ROWS * (8 + 4) + 3 * 4),
    "attention module": Kind(
        lambda: between_tanhs(lambda m, x: m.att(x), att=attention()), tokens, ROWS * ((8 + 3 * 8) + (8 + 8))
    ),
    # The numbers themselves are the input.
    "embedding": Kind(lambda: Apply(lambda m, x: torch.tanh(m.e(x)), e=nn.Embedding(7, 8)), numbers, ROWS * 8),
}
# torch's reentrant checkpoint computes no gradients if no input needs one. Compiling takes long.
WITHOUT = (("embedding", "reentrant"), ("linear, compiled", "reentrant"), ("linear, compiled", "other"))
WITH_CHECKPOINTS = [each for each in itertools.product(KINDS, CHECKPOINTS) if each not in WITHOUT]


@pytest.mark.parametrize(("name", "recompute"), WITH_CHECKPOINTS)
def test_each_kind_of_block(name: str, recompute: str) -> None:
    torch.manual_seed(0)
    kind = KINDS[name]
    model = Recomputed(kind.make(), CHECKPOINTS[recompute])
    assert bytes_between(model, kind.draw(), lower=False) == kind.read
