"""Models and batches for pipelines, and the plain torch run that each must equal.

What a pipeline adds to tests/reference.py: a step is one program, the backwards of its microbatches in the order of the
schedule, each microbatch's loss weighted by its share of the batch. Replicas are ranks, and a step is a window."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.pipeline import ActionKind, Schedule
from retrograde.pipeline.blocks import Chain
from retrograde.pipeline.pipeline import Pipeline
from tests.pipeline import architectures
from tests.pipeline.architectures import T5, TOKENS, Gpt2, Llama, Vit, VitBlock
from tests.reference import Grads, in_one_window

WIDTH = 8
LINEAR = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2")
IN_A_V = ("zb-v", "dualpipe-v", "v-half", "v-min")
SCHEDULES = LINEAR + IN_A_V


def lin(i: int = WIDTH, o: int = WIDTH) -> nn.Linear:
    return nn.Linear(i, o)


def linears(count: int) -> list[nn.Module]:
    return [lin() for _ in range(count)]


class Fn(nn.Module):
    """A block from a function of (module, *inputs) and named parts."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


class Scaled(nn.Module):
    """A block with keyword arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = lin()

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.a(x)) * mask[:, None] * scale


class Attentive(nn.Module):
    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), lin(WIDTH, 3 * WIDTH), lin()
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.recompute == "reentrant")

    def compute(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(mixed)


class Data(NamedTuple):
    args: tuple[Any, ...]
    target: Any
    options: dict[str, Any] = {}  # noqa: RUF012  never changed


def rows(batch: int = 8) -> Data:
    return Data((torch.randn(batch, WIDTH),), torch.randn(batch, WIDTH))


def sequences(batch: int = 8) -> Data:
    return Data((torch.randn(batch, 3, WIDTH),), torch.randn(batch, 3, WIDTH))


def words(batch: int = 8) -> Data:
    return Data((torch.randint(0, 11, (batch, 3)),), torch.randint(0, 11, (batch, 3)))


def labelled(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Case:
    """Eight blocks, so that they can be cut into 2, 4 or 8 stages."""

    blocks: Callable[[], list[nn.Module]]
    data: Callable[[], Data] = rows
    loss: Callable[..., Tensor] = F.mse_loss
    exact: bool = True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # the forwards, here and in plain torch
    compiled: bool = False  # here, not in plain torch

    def same(self, found: Tensor, wanted: Tensor) -> bool:
        """Bit for bit or, where additions are in another order, but for a few last bits of the largest element."""
        if self.exact or found.numel() == 0:
            return torch.equal(found, wanted)
        return bool((found - wanted).abs().max() <= 2e-6 * wanted.abs().max())

    def copies(self, blocks: list[nn.Module]) -> list[nn.Module]:
        """The blocks for a pipeline."""
        made = copy.deepcopy(blocks)
        if self.compiled:
            for block in made:
                block.compile(backend="aot_eager")
        return made


def tanhs(count: int) -> list[nn.Module]:
    return [Fn(lambda m, x: torch.tanh(m.a(x)), a=lin()) for _ in range(count)]


def tree_blocks() -> list[nn.Module]:
    """Dictionaries, tuples, integers, constants and a tensor that only passes through."""

    def first(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return {"x": y, "skip": (y * 2, x), "ids": torch.arange(len(x)), "why": "because", "n": 3, "none": None}

    def middle(m: Any, t: Any) -> Any:
        assert t["why"] == "because" and t["n"] == 3 and t["none"] is None and t["ids"].dtype is torch.int64
        return {**t, "x": torch.tanh(m.a(t["x"]))}

    def last(m: Any, t: Any) -> Tensor:
        return m.a(t["x"]) + t["skip"][0] + t["skip"][1] + t["ids"][:, None]

    return [Fn(first, a=lin()), *(Fn(middle, a=lin()) for _ in range(6)), Fn(last, a=lin())]


def unused_output() -> list[nn.Module]:
    """The second output of each block is dropped by the next: it has no gradient."""

    def block(m: Any, x: Tensor, y: Tensor | None = None) -> Any:
        return torch.tanh(m.a(x)), m.b(x)

    return [*(Fn(block, a=lin(), b=lin()) for _ in range(7)), Fn(lambda m, x, y: m.a(x), a=lin())]


def in_place() -> list[nn.Module]:
    def block(m: Any, x: Tensor) -> Tensor:
        x += 1
        y = m.a(x)
        y *= 2
        return y.t().t()

    return [Fn(block, a=lin()) for _ in range(8)]


def frozen(blocks: list[nn.Module], which: Callable[[int, str], bool]) -> list[nn.Module]:
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not which(number, name))
    return blocks


def tied(first: int, last: int) -> list[nn.Module]:
    blocks = tanhs(8)
    blocks[last].a.weight = blocks[first].a.weight
    return blocks


def tied_transposed() -> list[nn.Module]:
    """One weight, whose memory is not row by row, in two blocks, of which one gives it no gradient."""
    blocks = tanhs(8)
    blocks[7] = Fn(lambda m, x: torch.tanh(nn.functional.linear(x, m.a.weight.detach(), m.a.bias)), a=lin())
    shared = nn.Parameter(blocks[0].a.weight.detach().t().contiguous().t())
    blocks[0].a.weight = blocks[7].a.weight = shared
    return blocks


def language() -> list[nn.Module]:
    return [nn.Embedding(11, WIDTH), *(Attentive() for _ in range(6)), lin(WIDTH, 11)]


def lowered() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def attentions() -> list[nn.Module]:
    """Packed projections: of one input, and of two."""

    def own(m: Any, x: Tensor) -> Tensor:
        return x + m.att(x, x, x, need_weights=False)[0]

    def cross(m: Any, x: Tensor) -> Tensor:
        other = x.flip(1)
        return x + m.att(x, other, other, need_weights=False)[0]

    return [Fn(cross if n % 2 else own, att=nn.MultiheadAttention(WIDTH, 2, batch_first=True)) for n in range(8)]


def wide_sequences() -> Data:
    return Data((torch.randn(8, TOKENS, architectures.WIDTH),), torch.randn(8, TOKENS, architectures.WIDTH))


def pictures() -> Data:
    """Of four patches each, which become five tokens."""
    return Data((torch.randn(8, 3, 8, 8),), torch.randn(8, 5, architectures.WIDTH))


def constants() -> list[nn.Module]:
    """Every block also returns something that depends on a parameter alone."""

    def block(m: Any, x: Tensor, c: Tensor | None = None) -> Any:
        return torch.tanh(m.a(x)) + (0 if c is None else c), m.p.square()

    return [*(Fn(block, a=lin(), p=torch.randn(WIDTH)) for _ in range(7)), Fn(lambda m, x, c: m.a(x) * c, a=lin())]


own_linear = rg.defer(lambda x, weight, bias=None: F.linear(x, weight, bias))


def products() -> list[nn.Module]:
    """A matrix for each head, a function given to `rg.defer`, experts, in turn."""

    def heads(m: Any, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (2, 4)).transpose(1, 2) @ m.w).transpose(1, 2).flatten(2).tanh().float()

    def own(m: Any, x: Tensor) -> Tensor:
        return own_linear(x, m.a.weight, m.a.bias).tanh().float()

    def experts(m: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        ends = torch.tensor([len(rows) // 3, len(rows) // 3, len(rows)], dtype=torch.int32)
        return F.grouped_mm(rows, m.w, offs=ends).view(x.shape).tanh().float()

    def block(number: int) -> nn.Module:
        if number % 3 == 0:
            return Fn(heads, w=torch.randn(2, 4, 4))
        return Fn(own, a=lin()) if number % 3 == 1 else Fn(experts, w=torch.randn(3, WIDTH, WIDTH))

    return [block(number) for number in range(8)]


CASES: dict[str, Case] = {
    "plain": Case(lambda: tanhs(8)),
    "uneven microbatches": Case(lambda: tanhs(8), lambda: rows(11)),
    "transformer": Case(language, words, labelled),
    "checkpoint": Case(lambda: [Attentive("other") for _ in range(8)], sequences),
    "reentrant checkpoint": Case(lambda: [lin(), *(Attentive("reentrant") for _ in range(7))], sequences),
    "trees": Case(tree_blocks),
    "outputs without gradient": Case(unused_output),
    "in place": Case(in_place),
    "views": Case(
        lambda: [Fn(lambda m, x: m.a(x.transpose(1, 2)).tanh().transpose(1, 2)[:, :], a=lin(3, 3)) for _ in range(8)],
        sequences,
    ),
    "memory order": Case(lambda: [Fn(lambda m, x: m.a(x).t().contiguous().t(), a=lin()) for _ in range(8)]),
    "first blocks frozen": Case(lambda: frozen(tanhs(8), lambda n, name: n < 4)),
    "last blocks frozen": Case(lambda: frozen(tanhs(8), lambda n, name: n >= 4)),
    "partly frozen": Case(lambda: frozen(tanhs(8), lambda n, name: n % 3 == 0 or "bias" in name)),
    "parameter only": Case(constants),
    "block called twice": Case(lambda: [Fn(lambda m, x: m.a(m.a(x).relu()), a=lin()) for _ in range(8)]),
    "tied next to each other": Case(lambda: tied(0, 1)),
    # Torch adds a tied weight's two gradients per microbatch; here each stage adds up its own over all microbatches
    # first. The order of the same additions differs, so the last bit may.
    "tied at both ends": Case(lambda: tied(0, 7), exact=False),
    "tied, transposed": Case(tied_transposed, exact=False),
    "keyword arguments": Case(
        lambda: [Scaled() if n % 2 else tanhs(1)[0] for n in range(8)],
        lambda: Data((torch.randn(8, WIDTH),), torch.randn(8, WIDTH), {"mask": torch.rand(8), "scale": 0.5}),
    ),
    "convolutions": Case(
        lambda: [
            Fn(lambda m, x: m.n(m.c(x)).relu(), c=nn.Conv2d(4, 4, 3, padding=1), n=nn.BatchNorm2d(4)) for _ in range(8)
        ],
        lambda: Data((torch.randn(8, 4, 5, 5),), torch.randn(8, 4, 5, 5)),
    ),
    "attention modules": Case(attentions, sequences),
    "products": Case(products, sequences),
    "autocast, products": Case(products, sequences, around=lowered),
    "autocast": Case(language, words, labelled, around=lowered),
    "autocast, attention modules": Case(attentions, sequences, around=lowered),
    "autocast, block called twice": Case(
        lambda: [Fn(lambda m, x: m.a(m.a(x).relu()).float(), a=lin()) for _ in range(8)], around=lowered
    ),
    "autocast, checkpoint": Case(lambda: [Attentive("other") for _ in range(8)], sequences, around=lowered),
    "Llama": Case(lambda: [Llama() for _ in range(8)], wide_sequences),
    "GPT-2": Case(lambda: [Gpt2() for _ in range(8)], wide_sequences),
    "T5": Case(lambda: [T5() for _ in range(8)], wide_sequences),
    "ViT": Case(lambda: [Vit(), *(VitBlock() for _ in range(7))], pictures),
    "autocast, Llama": Case(lambda: [Llama() for _ in range(8)], wide_sequences, around=lowered),
    "autocast, ViT": Case(lambda: [Vit(), *(VitBlock() for _ in range(7))], pictures, around=lowered),
    # Graphs add up otherwise than single operations.
    "compiled": Case(language, words, labelled, exact=False, compiled=True),
    "compiled, attention modules": Case(attentions, sequences, exact=False, compiled=True),
    "compiled, Llama": Case(lambda: [Llama() for _ in range(8)], wide_sequences, exact=False, compiled=True),
    "compiled, autocast": Case(language, words, labelled, exact=False, around=lowered, compiled=True),
    "empty tensor": Case(
        lambda: (
            [Fn(lambda m, x, e=None: (torch.tanh(m.a(x)), x[:0]), a=lin()) for _ in range(7)]
            + [Fn(lambda m, x, e: m.a(x) + e.sum(), a=lin())]
        )
    ),
}


def cut(value: Any, count: int) -> list[Any]:
    if isinstance(value, Tensor):
        return list(value.tensor_split(count))
    return [value] * count


def shares(rows: int, count: int) -> list[float]:
    """How much of a batch each microbatch is."""
    return [len(part) / rows for part in torch.zeros(rows).tensor_split(count)]


def plain_losses(
    blocks: Sequence[nn.Module], data: Data, loss: Callable[..., Tensor], count: int, copied: bool = False
) -> list[Tensor]:
    """Plain torch's losses of the microbatches. `copied`: blocks may change their inputs."""
    chain = Chain(list(blocks))
    args = list(zip(*(cut(arg, count) for arg in data.args), strict=True))
    losses = []
    for number, target in enumerate(cut(data.target, count)):
        options = {name: cut(value, count)[number] for name, value in data.options.items()}
        own = copy.deepcopy(args[number]) if copied else args[number]
        losses.append(loss(chain(*own, **options), target))
    return losses


def plain_backward(losses: Sequence[Tensor], weights: Sequence[float], order: Sequence[int]) -> None:
    for number in order:
        (losses[number] * weights[number]).backward()


def total(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    result = losses[0].detach() * weights[0]
    for loss, weight in zip(losses[1:], weights[1:], strict=True):
        result = result + loss.detach() * weight
    return result


def plain_step(
    blocks: Sequence[nn.Module],
    data: Data,
    loss: Callable[..., Tensor],
    order: Sequence[int],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """One step of plain torch: losses weighted by size, the backwards of the microbatches in the given order."""
    with around():
        losses = plain_losses(blocks, data, loss, len(order), copied=True)
    weights = shares(len(data.target), len(order))
    plain_backward(losses, weights, order)
    return total(losses, weights)


def replicas_step(case: Case, blocks: Sequence[nn.Module], order: Sequence[int], replicas: int, seed: int) -> Grads:
    """Gradients of one step of each replica, with data of its own, and their mean."""

    def program(model: nn.ModuleList, replica: int) -> None:
        torch.manual_seed(seed + replica)
        plain_step(list(model), case.data(), case.loss, order, case.around)

    return in_one_window(lambda: nn.ModuleList(copy.deepcopy(blocks)), replicas, program)


def backward_order(schedule: Schedule) -> list[int]:
    """In which order the weight gradients of microbatches are added; it must be one order for all stages."""
    orders = {
        tuple(a.microbatch for a in actions if a.stage == stage and a.kind in (ActionKind.W, ActionKind.B))
        for actions in schedule.ranks
        for stage in {a.stage for a in actions}
    }
    (order,) = orders
    return [number for number in order if number is not None]


def compare(name: str, pipe: Pipeline, blocks: list[nn.Module], case: Case) -> list[str]:
    """Differences between the gradients on this rank and those of the whole plain model."""
    whole = dict(nn.ModuleList(blocks).named_parameters(remove_duplicate=False))
    wrong = []
    for key, parameter in pipe.named_parameters():
        wanted, found = whole[key].grad, None if parameter.grad is None else parameter.grad.cpu()
        if (wanted is None) != (found is None):
            wrong.append(f"{name}: {key} has gradient {found is not None}, torch {wanted is not None}")
        elif wanted is not None and not case.same(found, wanted):
            wrong.append(f"{name}: {key} differs by {(wanted - found).abs().max()}")
    return wrong


def reductions(pipe: Pipeline) -> list[str]:
    """Each unit with a gradient is reduced once in a step; what is wrong with that."""
    wrong = []
    for unit in pipe.engine.units:
        expected = int(any(leaf.grad is not None for leaf in unit.leaves))
        if (count := pipe.engine.ledger.count("reduce", unit.name)) != expected:
            wrong.append(f"unit {unit.name} was reduced {count} times instead of {expected}")
    return wrong
