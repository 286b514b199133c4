"""Operators, forward and backward, give the CPU's numbers bit for bit, without the host waiting for the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.accelerator import device
from tests.accelerator.ranks import alone, each_case
from tests.harness import Ranks


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def attention(**options: Any) -> nn.Module:
    return Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))


def masked_attention() -> nn.Module:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Function(run)


def indexing() -> nn.Module:
    return Function(
        lambda x: x[torch.tensor([0, 2, 0])] * x[:, 1::2].sum() + x.gather(1, torch.zeros_like(x).long())[0]
    )


def reductions() -> nn.Module:
    return Function(lambda x: torch.where(x > 0, x, 0.1 * x).cumsum(0).var(0) + x.logsumexp(0) + x.topk(1)[0].sum())


def losses() -> nn.Module:
    return Function(lambda x: F.smooth_l1_loss(x, x.detach() + 2) + F.binary_cross_entropy_with_logits(x, x.sigmoid()))


HEADS = ((2, 3, 7, 8),) * 3
OPERATORS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), ((4, 6),)),
    "convolution": (lambda: nn.Conv2d(3, 5, 3, padding=1), ((2, 3, 8, 8),)),
    "convolution in groups": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), ((2, 4, 8, 8),)),
    "dilated convolution": (lambda: nn.Conv1d(3, 5, 3, dilation=2), ((2, 3, 9),)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 5, 3), ((2, 3, 9, 9),)),
    "channels last": (lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), ((2, 4, 8, 8),)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2)), ((2, 3, 8, 8),)),
    "batch norm": (lambda: nn.BatchNorm2d(3), ((2, 3, 8, 8),)),
    "group norm": (lambda: nn.GroupNorm(3, 6), ((2, 6, 8),)),
    "layer norm": (lambda: nn.LayerNorm(6), ((2, 6),)),
    "rms norm": (lambda: nn.RMSNorm(6), ((2, 6),)),
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2), ((3, 2, 6),)),
    "lstm with everything": (
        lambda: nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3, bias=False),
        ((3, 2, 6),),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1), nn.Dropout(0.37)), ((40, 6),)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), ((2, 5, 8),)),
    "causal attention": (lambda: attention(is_causal=True), HEADS),
    "masked attention": (masked_attention, HEADS),
    "attention with dropout": (lambda: attention(dropout_p=0.2), HEADS),
    "grouped attention": (lambda: attention(enable_gqa=True), ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8))),
    "indexing": (indexing, ((4, 3),)),
    "reductions": (reductions, ((4, 3),)),
    "losses": (losses, ((4, 3),)),
    "products": (lambda: Function(lambda x, y: torch.einsum("ij,kj->ik", x, y).softmax(-1)), ((4, 3), (5, 3))),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), ((5, 4),)),
    "fourier": (lambda: Function(lambda x: torch.fft.rfft(x).abs()), ((5, 4),)),
}


def _values(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    result = module(*inputs)
    if isinstance(result, tuple):
        result = result[0] + result[1][0].sum()
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in inputs), *(p.grad for p in module.parameters()), *module.buffers()]


def _equal(name: str) -> None:
    make, shapes = OPERATORS[name]
    torch.manual_seed(0)
    module = make()
    inputs = [torch.randn(shape) for shape in shapes]
    there = device.move(copy.deepcopy(module), device.of_rank(0))
    sent = [x.to("late").requires_grad_() for x in inputs]
    want = _values(module, [x.requires_grad_() for x in inputs])
    with device.use("lazy"):
        got = _values(there, sent)
        assert device.synchronisations() == {}
    assert len(got) == len(want) > len(inputs)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("name", OPERATORS)
def test_like_the_cpu(late_ranks: Ranks, name: str) -> None:
    late_ranks(1).run(alone, _equal, name)


def embeddings() -> None:
    ids = torch.randint(0, 10, (3, 5))
    for make in (lambda: nn.Embedding(10, 4, padding_idx=3), lambda: nn.EmbeddingBag(10, 4)):
        torch.manual_seed(0)
        module = make()
        there = device.move(copy.deepcopy(module), device.of_rank(0))
        for each, x in ((module, ids), (there, ids.to("late"))):
            each(x).square().sum().backward()
        assert torch.equal(there.weight.grad.cpu(), module.weight.grad)


def values_that_decide_a_shape_make_the_host_wait() -> None:
    x = torch.randn(8, 4)
    there = x.to("late")
    with device.use("lazy"):
        assert torch.equal(there[there > 0].cpu(), x[x > 0])
        assert torch.equal(there.nonzero().cpu(), x.nonzero())
        waits = device.synchronisations()
    assert waits["aten::index.Tensor"] == waits["aten::nonzero"] == 1


def random_numbers_are_drawn_in_the_order_of_issue() -> None:
    torch.manual_seed(3)
    want = [torch.randn(5), torch.rand(5), torch.randn(5), torch.randperm(5)]
    torch.manual_seed(3)
    with device.use("lazy"):
        first, second = torch.randn(5, device="late"), torch.rand(5, device="late")
        third, fourth = torch.randn(5), torch.randperm(5, device="late")
        got = [second.cpu(), first.cpu(), third, fourth.cpu()]
    assert all(map(torch.equal, got, (want[1], want[0], want[2], want[3])))
    generator = torch.Generator().manual_seed(9)
    want_own = torch.randn(5, generator=torch.Generator().manual_seed(9))
    assert torch.equal(torch.randn(5, device="late", generator=generator).cpu(), want_own)


def results_may_be_given_and_grow() -> None:
    x = torch.randn(6)
    for out in (torch.empty(0), torch.empty(6), torch.empty(2, 3)):
        there = out.to("late")
        with device.use("lazy"):
            assert torch.equal(torch.add(x.to("late"), 1, out=there.resize_(0)).cpu(), x + 1)
            assert torch.equal(torch.nonzero(x.to("late") > 0, out=there.long().resize_(0)).cpu(), torch.nonzero(x > 0))


def tensors_of_two_devices_are_refused() -> None:
    x = torch.ones(3, device="late:0")
    for other in (torch.ones(3), torch.ones(3, device="late:1")):
        try:
            x + other
        except RuntimeError as error:
            assert "aten::add.Tensor" in str(error)
            assert "device" in str(error)
        else:
            raise AssertionError("nothing was raised")
    assert (x + torch.tensor(2.0)).sum().item() == 9  # a number may come from anywhere
    assert x[torch.tensor([0, 2])].sum().item() == 2  # indices too, but not what they are for
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3)[torch.tensor([0, 2], device="late:0")]
    assert x.to("late:1").to("late:0").sum().item() == 3


def failures_name_the_operator() -> None:
    F.embedding(torch.tensor([9]).to("late"), torch.randn(4, 4, device="late"))
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        assert "asynchronous failure of aten::" in str(error)
        assert "index out of range" in str(error)
    else:
        raise AssertionError("nothing was raised")


def autocast() -> None:
    module = device.move(nn.Linear(4, 4), device.of_rank(0))
    with torch.autocast("late", dtype=torch.bfloat16):
        result = module(torch.randn(2, 4, device="late"))
        loss = F.cross_entropy(result, torch.zeros(2, dtype=torch.long, device="late"))
    loss.backward()
    assert (result.dtype, loss.dtype, module.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@each_case(
    embeddings,
    values_that_decide_a_shape_make_the_host_wait,
    random_numbers_are_drawn_in_the_order_of_issue,
    results_may_be_given_and_grow,
    tensors_of_two_devices_are_refused,
    failures_name_the_operator,
    autocast,
)
def test_particulars(late_ranks: Ranks, case: Any) -> None:
    late_ranks(1).run(alone, case)
