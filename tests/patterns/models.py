"""The models of the matrix: tiny, with sizes that no world size divides, and repeated blocks as units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 11
CLASSES = 5
FEATURES = 6


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


class Remat(NamedTuple):
    """Where activations are recomputed: inside a block, around it, or nested in itself."""

    where: str
    reentrant: bool

    def __call__(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.where != "nested":
            return checkpoint(module, x, use_reentrant=self.reentrant)
        inner = Remat("around", self.reentrant)
        return checkpoint(lambda h: inner(module, h) + module(h), x, use_reentrant=self.reentrant)


class Blocks(nn.Module):
    """Equal blocks between `embed`, which each model has of its own, and `read`.

    `path`: which of them run, and in which order."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 3, remat: Remat | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.remat = remat if remat is not None and remat.where != "inside" else None

    def walk(self, h: Tensor, path: Sequence[int] | None = None) -> Tensor:
        for index in range(len(self.blocks)) if path is None else path:
            block = self.blocks[index]
            h = block(h) if self.remat is None else self.remat(block, h)
        return h

    def read(self, h: Tensor) -> Any:
        return self.head(h)

    def forward(self, x: Tensor, path: Sequence[int] | None = None) -> Any:
        return self.read(self.walk(self.embed(x), path))


class MlpBlock(nn.Module):
    def __init__(self, width: int = 10, hidden: int = 13, remat: Remat | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.remat = remat if remat is not None and remat.where == "inside" else None

    def norm_only(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def inner(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm(h)
        return h + (self.inner(normed) if self.remat is None else self.remat(self.inner, normed))


class Mlp(Blocks):
    def __init__(self, remat: Remat | None = None) -> None:
        super().__init__(partial(MlpBlock, remat=remat), remat=remat)
        self.inp = nn.Linear(FEATURES, 10)
        self.head = nn.Linear(10, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        return self.inp(x)


class TwinBlock(nn.Module):
    """Two layers that share one weight: tied inside a unit."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, h: Tensor) -> Tensor:
        return h + self.second(F.gelu(self.first(h)))


class TwinMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwinBlock() for _ in range(3))


class CrossTiedMlp(Mlp):
    """The first and the last block share a weight: tied across units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class GptBlock(nn.Module):
    def __init__(self, width: int = 12, heads: int = 2, remat: Remat | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.remat = remat if remat is not None and remat.where == "inside" else None

    def norm_only(self, h: Tensor) -> Tensor:
        return self.norm2(h)

    def attend(self, h: Tensor) -> Tensor:
        B, T, C = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(B, T, C))

    def forward(self, h: Tensor) -> Tensor:
        h = h + (self.attend(h) if self.remat is None else self.remat(self.attend, h))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Gpt(Blocks):
    """Takes token ids, or embeddings where an input gradient is wanted."""

    def __init__(self, tied: bool = False, remat: Remat | None = None) -> None:
        super().__init__(partial(GptBlock, remat=remat), remat=remat)
        self.tokens = nn.Embedding(VOCAB, 12)
        self.positions = nn.Parameter(0.1 * torch.randn(7, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, x: Tensor) -> Tensor:
        h = x if x.is_floating_point() else self.tokens(x)
        return h + self.positions[: h.shape[1]]

    def read(self, h: Tensor) -> Tensor:
        return self.head(self.norm(h))


class ConvBlock(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.gelu(self.norm(self.conv(h)))


class ConvNet(Blocks):
    def __init__(self) -> None:
        super().__init__(ConvBlock)
        self.stem = nn.Conv2d(3, 7, 3, padding=1)
        self.head = nn.Linear(7, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def read(self, h: Tensor) -> Tensor:
        return self.head(h.mean(dim=(2, 3)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 9, num_layers=2, batch_first=True)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    notes: dict[str, Any]


class Opaque:
    """An output that no tree utility can look into."""

    __slots__ = ("_held",)

    def __init__(self, **held: Tensor) -> None:
        self._held = held

    def get(self, name: str) -> Tensor:
        return self._held[name]


class DataclassNet(Mlp):
    def __init__(self, opaque: bool = False) -> None:
        super().__init__()
        self.opaque = opaque

    def read(self, h: Tensor) -> Any:
        logits = self.head(h)
        if self.opaque:
            return Opaque(logits=logits, hidden=h)
        return Output(logits, h, {"rows": h.shape[0]})


class WideMlp(nn.Module):
    """One parameter far larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 10)
        self.wide = nn.Linear(10, 12_289)
        self.narrow = nn.Linear(12_289, 10, bias=False)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.narrow(F.gelu(self.wide(self.inp(x)))))


class OddShapes(Mlp):
    """Parameters without elements and without dimensions, in the root and in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(0.75))
            block.hollow = nn.Parameter(torch.empty(3, 0))

    def embed(self, x: Tensor) -> Tensor:
        return self.inp(x) * self.scale + self.nothing.sum()

    def walk(self, h: Tensor, path: Sequence[int] | None = None) -> Tensor:
        for block in self.blocks:
            h = block(h) * block.gain + block.hollow.sum()
        return h


class OnlyScalar(nn.Module):
    """Fewer elements than ranks: most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :CLASSES] * self.scale


class LoraLinear(nn.Module):
    """A frozen layer with a trained low-rank update beside it."""

    def __init__(self, base: nn.Linear, outputs: int, inputs: int, rank: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(inputs * outputs)
        self.base = base
        self.a = nn.Parameter(0.2 * torch.randn(rank, inputs, generator=generator))
        self.b = nn.Parameter(0.2 * torch.randn(outputs, rank, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def add_lora(model: Mlp) -> None:
    """Freezes the model and gives every block's layers adapters."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = LoraLinear(block.up, 13, 10)
        block.down = LoraLinear(block.down, 10, 13)


def lora_mlp() -> Mlp:
    model = Mlp()
    add_lora(model)
    return model


class Gan(nn.Module):
    """Two models that are sharded apart; the container is not."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Mlp()
        self.generator.head = nn.Linear(10, FEATURES)
        self.critic = Mlp()
        self.critic.head = nn.Linear(10, 1)


def _vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(4, FEATURES, generator=generator)
    return Batch(x, torch.randint(0, CLASSES, (4,), generator=generator))


def _sequences(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 5, FEATURES, generator=generator)
    return Batch(x, torch.randint(0, CLASSES, (4,), generator=generator))


def _images(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 3, 5, 5, generator=generator)
    return Batch(x, torch.randint(0, CLASSES, (4,), generator=generator))


def _tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(0, VOCAB, (3, 7), generator=generator)
    return Batch(ids[:, :-1], ids[:, 1:])


def logits_of(out: Any) -> Tensor:
    if isinstance(out, Output):
        return out.logits
    return out.get("logits") if isinstance(out, Opaque) else out


@dataclass(frozen=True)
class Spec:
    """A model and the data it eats."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch] = _vectors

    def batch(self, rank: int, step: int) -> Batch:
        return self.make_batch(torch.Generator().manual_seed(1000 * step + rank + 1))

    def in_dtype(self, dtype: torch.dtype | None) -> Spec:
        """With inputs in this dtype."""

        def cast(generator: torch.Generator) -> Batch:
            batch = self.make_batch(generator)
            return batch._replace(x=batch.x.to(dtype)) if batch.x.is_floating_point() else batch

        return Spec(self.build, cast)

    def loss(self, out: Any, y: Tensor) -> Tensor:
        logits = logits_of(out)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


SPECS: dict[str, Spec] = {
    "mlp": Spec(Mlp),
    "gpt": Spec(Gpt, _tokens),
    "tied-gpt": Spec(partial(Gpt, tied=True), _tokens),
    "conv": Spec(ConvNet, _images),
    "lstm": Spec(Lstm, _sequences),
    "dataclass": Spec(DataclassNet),
    "opaque": Spec(partial(DataclassNet, opaque=True)),
    "twin-mlp": Spec(TwinMlp),
    "cross-mlp": Spec(CrossTiedMlp),
    "wide-mlp": Spec(WideMlp),
    "odd-shapes": Spec(OddShapes),
    "scalar": Spec(OnlyScalar),
    "lora-mlp": Spec(lora_mlp),
    "gan": Spec(Gan),
}
for _where in ("inside", "around", "nested"):
    for _reentrant, _suffix in ((False, "remat"), (True, "reentrant")):
        _remat = Remat(_where, _reentrant)
        SPECS[f"mlp-{_suffix}-{_where}"] = Spec(partial(Mlp, remat=_remat))
        SPECS[f"gpt-{_suffix}-{_where}"] = Spec(partial(Gpt, remat=_remat), _tokens)
