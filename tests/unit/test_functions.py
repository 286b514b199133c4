"""What torch's functions say of sharded tensors: what they say of the whole, on every rank.

The functions are those that torch lets a subclass of Tensor serve, with arguments chosen by their names. Those that a
plain tensor refuses so are left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

from retrograde.engine.shard import Options, shard_over
from retrograde.parameters.part import Part
from retrograde.parameters.routes import Route, row_of
from retrograde.transport import ThreadRanks
from tests import threads

SHAPE = (4, 4)
# What is asked about memory has no answer for the whole. What is random is further down.
NOT_COMPARED = {Route.MEMORY, Route.REFUSED, Route.DRAWN, Route.UNSCALED, Route.GRADIENTS}
# Random, without values, of other devices, or about memory: of a parameter, that is a page's.
NAMES = """
__array__ __dlpack__ __format__ __iter__ _assert_async alpha_dropout alpha_dropout_ bernoulli binomial cuda
dim_order dropout dropout1d dropout2d dropout3d dropout_ empty_like feature_alpha_dropout
feature_alpha_dropout_ feature_dropout feature_dropout_ fractional_max_pool2d
fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices gumbel_softmax ipu
is_contiguous kaiming_uniform_ lobpcg mtia multinomial native_dropout new_empty new_empty_strided normal numpy
pca_lowrank pin_memory poisson rand_like randint_like randn_like rrelu rrelu_ slice_inverse stride svd_lowrank
xpu
"""
NAMES_NOT_COMPARED = frozenset(NAMES.split())


def values() -> Tensor:
    """Some negative, some larger than one, with exact sums."""
    return (torch.arange(16, dtype=torch.double).view(SHAPE) - 6) / 8


OTHER = torch.arange(16, dtype=torch.double).view(SHAPE).flip(0) / 4 + 1
BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("other", "end", "tensor1", "tensor2", "values", "x", "y", "source", "src", "vec2", "mat2"), OTHER),
    **dict.fromkeys(("target", "batch1", "batch2", "mat1", "tensor", "B", "p2", "x2", "the_template"), OTHER),
    **dict.fromkeys(("exponent", "n", "k", "kernel_size", "dims", "chunks", "sections", "num_classes", "groups"), 2),
    **dict.fromkeys(("indices_or_sections", "split_size_or_sections", "split_size", "repeats", "kthvalue"), 2),
    **dict.fromkeys(("min", "max", "threshold", "value", "fill_value", "lambd", "weight", "maxnorm", "q", "ord"), 0.5),
    **dict.fromkeys(("dim", "axis", "dim0", "axis0", "start", "p", "offset", "diagonal", "source_dim", "idx"), 0),
    **dict.fromkeys(("dim1", "axis1", "length", "destination", "correction", "shifts", "step", "reps"), 1),
    "mask": OTHER > 2,
    "condition": OTHER > 2,
    "index": torch.tensor([2, 0]),
    "dtype": torch.float,
    "shape": (2, 8),
    "size": (2, 8),
    "vec": OTHER[0],
    "boundaries": torch.tensor([-0.5, 0.0, 0.5]).double(),
}


class Function(NamedTuple):
    """One of torch's, with arguments behind the tensor."""

    func: Callable[..., Any]
    args: list[Any]
    whole_numbers: bool

    @property
    def name(self) -> str:
        return self.func.__name__ + " of whole numbers" * self.whole_numbers

    def __call__(self, tensor: Tensor) -> Any:
        return self.func(tensor.mul(8).long() if self.whole_numbers else tensor, *self.args)


class Said(NamedTuple):
    """By a function of a plain tensor."""

    name: str
    function: Callable[[Tensor], Any]
    want: list[Any]


def candidates() -> Iterator[Function]:
    for func, stub in get_testing_overrides().items():
        name = func.__name__
        between_ranks = "distributed" in (getattr(func, "__module__", None) or "")
        if name == "__get__" or between_ranks or row_of(func) in NOT_COMPARED or name in NAMES_NOT_COMPARED:
            continue
        rest = list(inspect.signature(stub).parameters.values())[1:]
        needed = [each.name for each in rest if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
        if all(each in BY_NAME for each in needed):
            args = [BY_NAME[each] for each in needed]
            yield from (Function(func, args, whole_numbers) for whole_numbers in (False, True))


def outcome(function: Callable[[Tensor], Any], tensor: Tensor) -> list[Any]:
    """What it returns, and what the tensor is then."""
    result = function(tensor)
    return [whole(result), whole(tensor)]


def whole(result: Any) -> Any:
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return [whole(each) for each in result]
    if isinstance(result, Part):
        return result.full_tensor().detach().clone()
    if not isinstance(result, Tensor):
        return result
    return result.clone() if result.layout is torch.strided else result.to_dense()


def same(got: Any, want: Any) -> bool:
    if isinstance(want, Tensor):
        # Tolerance: kernels compute the ends of a piece by other instructions than the middle of it.
        close = isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype
        return close and torch.allclose(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want))
    return type(got) is type(want) and got == want


def served() -> list[Said]:
    """The functions that are for such a tensor."""
    found = []
    for function in candidates():
        try:
            found.append(Said(function.name, function, outcome(function, values())))
        except Exception:
            continue
    return found


class Net(nn.Module):
    """The matrix is cut inside its rows by 3 and 5 ranks; of 5, two have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(5, dtype=torch.double))
        self.matrix = nn.Parameter(values())
        self.after = nn.Parameter(torch.ones(3, dtype=torch.double))


def different(all_said: list[Said], of_gradients: bool, world: int = 3) -> list[list[str]]:
    """For each rank: what else was said of the sharded matrix, or of its gradient."""

    def program(ranks: ThreadRanks) -> list[str]:
        model = Net()
        shard_over(ranks, model, Options(stage=3, timeout=20.0))
        param = model.get_parameter("matrix")
        found = [said.name for said in all_said if not _agrees(said, param, of_gradients)]
        param.full_tensor()  # nobody's model goes before all have ended
        return found

    return threads.run(world, program, timeout=120.0)


def _agrees(said: Said, param: nn.Parameter, of_gradients: bool) -> bool:
    if of_gradients:
        param.grad = values()
    else:
        with torch.no_grad():
            param.copy_(values())
    tensor = param.grad if of_gradients else param.detach()
    assert tensor is not None
    try:
        return same(outcome(said.function, tensor), said.want)
    except Exception:  # which a plain tensor does not raise
        return False


@pytest.mark.filterwarnings("ignore")  # some functions say that they will go
@pytest.mark.parametrize("of_gradients", (False, True))
def test_functions_say_what_they_say_of_the_whole(of_gradients: bool) -> None:
    said = served()
    assert len({each.name for each in said}) > 500
    assert different(said, of_gradients) == [[], [], []]


def test_the_matrix_is_cut_inside_its_rows() -> None:
    def program(ranks: ThreadRanks) -> int:
        model = Net()
        shard_over(ranks, model, Options(stage=3, timeout=20.0))
        return model.get_parameter("matrix").local.numel()  # type: ignore[attr-defined, no-any-return]

    assert [threads.run(world, program) for world in (3, 5)] == [[3, 11, 2], [0, 6, 7, 3, 0]]


# ---- more than a name and simple arguments
def _filled(fill: Callable[[Tensor], Any]) -> Tensor:
    """A plain tensor that is written to."""
    plain = OTHER.clone()
    fill(plain)
    return plain


FORMS: dict[str, Callable[[Tensor], Any]] = {
    # plain tensors beside it, of its shape or spread over it
    "plain first": lambda t: [OTHER - t, OTHER / t.add(2), torch.where(OTHER > 2, t, OTHER), OTHER @ t, OTHER.eq(t)],
    "a row": lambda t: [t * OTHER[0], OTHER[0] + t, t.clamp(min=OTHER[0]), torch.lerp(t, OTHER[0], 0.5)],
    "a column": lambda t: [t * OTHER[:, :1], OTHER[:, :1] > t, t.masked_fill(OTHER[:, :1] > 2, 0.0)],
    "larger": lambda t: [t + torch.ones(3, 4, 4), t[None] * torch.ones(2, 1, 1), torch.ones(3, 4, 4).double() * t],
    "one number": lambda t: [t * torch.tensor(2.0), torch.tensor([[2.0]]) - t, 1 - t, 2**t, t % 0.5, t // 0.25],
    "another dtype": lambda t: [t * OTHER.float(), t.float() + OTHER, t.long() / 2, t.to(torch.half), t.int() & 3],
    "in place beside plain": lambda t: t.mul_(OTHER[0]).add_(OTHER).addcmul_(OTHER, OTHER, value=2).lerp_(OTHER, 0.5),
    "written to plain": lambda t: [
        _filled(lambda plain: plain.add_(t)),
        _filled(lambda plain: plain[1:3].copy_(t[:2])),
        _filled(lambda plain: plain.__setitem__(0, t[0])),
        _filled(lambda plain: torch.mul(t, 2, out=plain)),
        _filled(lambda plain: torch._foreach_add_([plain, plain], [t, t])),
    ],
    "out": lambda t: [
        torch.add(OTHER, 1, out=t),
        torch.mul(t, t, out=t),
        torch.amax(t, 1, out=torch.empty(4).double()),
    ],
    # parts of it
    "indexed": lambda t: [t[1], t[-1, 2], t[:, 1], t[1:3, ::2], t[..., None], t[[2, 0]], t[t > 0], t[OTHER > 2], t[:]],
    "written by index": lambda t: [t.__setitem__(at, 1.5) for at in (0, (2, 3), (slice(None), 1), OTHER > 4, [3, 1])],
    "written over": lambda t: [t.__setitem__(..., OTHER), t.__setitem__((slice(1, 3), 0), t[0, :2])],
    "written by methods": lambda t: t.index_fill_(0, torch.tensor([1]), 2.0).scatter_(1, torch.tensor([[3]]), 5.0),
    "sorted": lambda t: [t.sort(descending=True), t.topk(2), t.flatten().argsort(), t.unique(), torch.nonzero(t > 0)],
    # reductions
    "along": lambda t: [t.sum(0), t.sum((0, 1)), t.mean(-1, keepdim=True), t.norm(dim=1), t.any(0), t.amax((0, 1))],
    "as another dtype": lambda t: [t.sum(dtype=torch.float), t.mean(dtype=torch.float), t.norm(dtype=torch.double)],
    "norms": lambda t: [t.norm(order) for order in (0, 1, 2, 3, 0.5, -1, torch.inf, -torch.inf, "fro", "nuc")],
    "norms of matrices": lambda t: [torch.linalg.norm(t, order) for order in (None, 1, 2, "fro", torch.inf)],
    "norms of vectors": lambda t: [torch.linalg.vector_norm(t, order) for order in (0, 1, 2.5, torch.inf, -1)],
    "numbers": lambda t: [
        t.sum().item(),
        bool((t > 0).any()),
        float(t.max()),
        int(t.argmin()),
        t[0, 0].item(),
        0.5 in t,
    ],
    "by name": lambda t: [torch.sum(input=t), torch.add(input=t, other=OTHER), torch.max(t, dim=0).values, t.min(1)[1]],
    "two of them": lambda t: [torch.max(t, OTHER), torch.min(OTHER, t), t.equal(t.clone()), torch.allclose(t, OTHER)],
    "of whole numbers": lambda t: [t.long().sum(), (t > 0).sum(), t.int().mul(3).max(), (t > 0).long().cumsum(0)],
    # shapes
    "reshaped": lambda t: [
        t.view(2, 8),
        t.view(-1) * 2,
        t.flatten()[3:9],
        t.reshape(8, 2).sum(1),
        t.view_as(OTHER[None]),
    ],
    "turned": lambda t: [
        t.t(),
        t.T * OTHER,
        t.mT,
        t.transpose(0, 1).contiguous(),
        t.permute(1, 0),
        t.unbind(),
        t.chunk(2),
    ],
    "joined": lambda t: [torch.cat([t, OTHER]), torch.stack([t, t]), torch.hstack([OTHER, t]), torch.block_diag(t, t)],
    "lists": lambda t: [
        torch._foreach_mul([t, OTHER], 2),
        torch._foreach_add([t, t], [OTHER, t]),
        torch._foreach_norm([t]),
    ],
    "lists in place": lambda t: [torch._foreach_mul_([t], 2), torch._foreach_lerp_([t], [OTHER], 0.5), t.sum()],
    "made": lambda t: [torch.zeros_like(t), t.new_ones(3), t.new_zeros(t.shape) + t, torch.full_like(t, 2).sum()],
    "functions": lambda t: [
        F.softmax(t, 1),
        F.normalize(t, dim=0),
        F.linear(OTHER, t),
        F.relu(t),
        F.layer_norm(t, (4,)),
    ],
    "norms of lists": lambda t: [torch._foreach_norm([t, t * 2], order) for order in (0, 1, 2, 3, torch.inf, -1)],
    "named results": lambda t: [torch.frexp(t).mantissa, torch.sort(t).values, torch.aminmax(t).min, t.max(0).indices],
    "copies by index": lambda t: [t[t > 0].mul_(2), t[[2, 0]].add_(1), t[OTHER > 2].zero_(), t[:, [1]].neg_()],
    "in place by argument": lambda t: [F.relu(t, inplace=True), F.elu(t, inplace=True), F.leaky_relu(t, 0.5, True)],
    "dropped in place": lambda t: [F.dropout(t, 1.0, inplace=True), t.sum()],
    "edited, then read": lambda t: [t.add_(1).sum(), t.zero_().any(), t.fill_(2).mean(), t.copy_(OTHER).T[0]],
    "edited through a computed one": lambda t: [(u := t * 2).mul_(3), u.t().add_(1), u[0].zero_(), u],
}


@pytest.mark.parametrize("of_gradients", (False, True))
@pytest.mark.parametrize("world", (1, 2, 5))
def test_forms_of_calls(world: int, of_gradients: bool) -> None:
    said = [Said(name, form, outcome(form, values())) for name, form in FORMS.items()]
    assert different(said, of_gradients, world) == [[]] * world


# ---- random numbers, of one generator
DRAWN: dict[str, tuple[Any, ...]] = {
    "normal_": (0.0, 2.0),
    "uniform_": (-1.0, 1.0),
    "bernoulli_": (0.5,),
    "exponential_": (),
    "cauchy_": (),
    "geometric_": (0.5,),
    "log_normal_": (),
    "random_": (0, 10),
}


def _draw(tensor: Tensor, name: str) -> Any:
    return getattr(tensor, name)(*DRAWN[name], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("of_gradients", (False, True))
def test_random_numbers_are_those_of_the_whole(of_gradients: bool) -> None:
    draws = {name: functools.partial(_draw, name=name) for name in DRAWN}
    said = [Said(name, draw, outcome(draw, values())) for name, draw in draws.items()]
    assert different(said, of_gradients) == [[], [], []]
