"""How much of the weight gradients' work waits for W, and what does not: what `pipe.explain()` shows.

An account is kept of one microbatch of each stage. Work is counted in FLOPs, by torch's counter, on tensors without
data, and only when somebody asks: until then the account holds shapes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from retrograde.pipeline.formulas import GradientFormulas
from retrograde.pipeline.pairs import Pair
from retrograde.torch_internals import tree_flatten, tree_unflatten


class WeightWork(NamedTuple):
    """A use of parameters, and the FLOPs of their gradients. None: they cannot be counted."""

    what: str
    parameters: tuple[str, ...]
    flops: int | None
    waits: bool


class _TensorShape(NamedTuple):
    """What is kept of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "_TensorShape":
        return _TensorShape(tensor.shape, tensor.stride(), tensor.dtype)

    def without_data(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class _Call:
    """A deferrable call, without data."""

    formulas: GradientFormulas
    x: _TensorShape
    grad: _TensorShape
    targets: tuple[int, ...]
    waits: bool

    def work(self, names: Mapping[int, str]) -> WeightWork:
        grad, x = self.grad.without_data(), self.x.without_data()
        flops = _counted(lambda: self.formulas.param_grads(grad, x, len(self.targets) > 1))
        return WeightWork(type(self.formulas).__name__.lower(), _known(self.targets, names), flops, self.waits)


@dataclass(frozen=True)
class _OtherUse:
    """A use that is not deferrable, without data: it can be repeated to count what its gradient takes."""

    func: Callable[..., Any]
    parameter: int
    leaves: list[Any]
    spec: Any
    place: int

    def work(self, names: Mapping[int, str]) -> WeightWork:
        name = getattr(self.func, "__name__", str(self.func))
        return WeightWork(name, _known((self.parameter,), names), self._flops(), False)

    def _flops(self) -> int | None:
        leaves = [leaf.without_data() if isinstance(leaf, _TensorShape) else leaf for leaf in self.leaves]
        weight = leaves[self.place].requires_grad_()
        args, kwargs = tree_unflatten(leaves, self.spec)
        try:
            results = self.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None  # not every operation runs without data
        outputs = [r for r in tree_flatten(results)[0] if isinstance(r, Tensor) and r.requires_grad]
        return _counted(lambda: torch.autograd.grad(outputs, [weight], [torch.empty_like(o) for o in outputs]))


@dataclass
class Account:
    """Of one microbatch of one stage. Open from then on, so that no other comes in."""

    open: bool = False
    _calls: list[_Call] = field(default_factory=list)
    _others: list[_OtherUse] = field(default_factory=list)

    def note_pair(self, pair: Pair, waits: bool) -> None:
        targets = tuple(id(target.parameter) for target in pair.targets)
        self._calls.append(_Call(pair.formulas, _TensorShape.of(pair.x), _TensorShape.of(pair.grad), targets, waits))

    def note_use(self, parameter: Tensor, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        place = next((number for number, leaf in enumerate(leaves) if leaf is parameter), None)
        if place is None:
            return  # a view of it; the use of the view is noted where it is one
        shapes = [_TensorShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._others.append(_OtherUse(func, id(parameter), shapes, spec, place))

    def works(self, names: Mapping[int, str]) -> Iterator[WeightWork]:
        """`names` are those of all parameters of the stage that are trained. What nothing was seen of comes last."""
        for call in self._calls:
            yield call.work(names)
        for use in self._others:
            yield use.work(names)
        seen = {target for call in self._calls for target in call.targets} | {use.parameter for use in self._others}
        for key, name in names.items():
            if key not in seen:
                yield WeightWork("a Function of the user or a compiled graph", (name,), None, False)


def _known(parameters: Iterable[int], names: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(names.get(key, "?") for key in parameters)


def _counted(compute: Callable[[], object]) -> int | None:
    with FlopCounterMode(display=False) as counter:
        try:
            compute()
        except (RuntimeError, NotImplementedError):
            return None
    return int(counter.get_total_flops())


def share_of(works: Iterable[WeightWork]) -> float:
    """How much of the work that can be counted waits for W."""
    counted = [work for work in works if work.flops]
    total = sum(work.flops or 0 for work in counted)
    return sum(work.flops or 0 for work in counted if work.waits) / total if total else 1.0


def table(works: Iterable[WeightWork]) -> str:
    """What waits for W in one line, and a line for each kind of use that does not."""
    everything = list(works)
    total = sum(work.flops or 0 for work in everything)
    lines = [f"{share_of(everything):.1%} of the weight gradients' work waits for W ({total:,} FLOPs a microbatch)"]
    kinds: dict[str, list[WeightWork]] = {}
    for work in everything:
        if not work.waits:
            kinds.setdefault(work.what, []).append(work)
    for what, those in sorted(kinds.items(), key=lambda each: -sum(work.flops or 0 for work in each[1])):
        flops = sum(work.flops or 0 for work in those)
        names = list(dict.fromkeys(name for work in those for name in work.parameters))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        share = f"{flops / total:.1%}" if total else "0.0%"
        share = "unknown" if all(work.flops is None for work in those) else share
        lines.append(f"  in I: {what}, {share}: {shown}")
    return "\n".join(lines)
