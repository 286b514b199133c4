"""Counts how much of the weight gradients' work waits for W and how much does not, for `pipe.explain()`.

An account is kept of one microbatch of each stage. Work is counted in FLOPs, by torch's counter, on tensors without
data, and only when somebody asks: until then the account holds shapes.

Rule 1: work that cannot be counted is unknown, not nothing: the share is then a bound, and the text says so.
Rule 2: a use is counted once. A checkpoint that records its forward and its recompute shows it twice.
Rule 3: a gradient that came in I although no use of its parameter was seen is listed: a Function of the user or a
        compiled graph has made it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from retrograde.pipeline.formulas import GradientFormulas, Grouped
from retrograde.pipeline.fused import UserFormulas
from retrograde.pipeline.pairs import Pair
from retrograde.torch_internals import grouped_mm, tree_flatten, tree_unflatten

UNSEEN = "a Function of the user or a compiled graph"


class WeightWork(NamedTuple):
    """A use of parameters, and the FLOPs of their gradients (None if they cannot be counted)."""

    what: str
    parameters: tuple[str, ...]
    flops: int | None
    waits: bool


class _TensorShape(NamedTuple):
    """The shape, strides and dtype of a tensor, kept in place of the tensor."""

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
    """A deferrable call, with shapes in place of tensors."""

    formulas: GradientFormulas
    x: _TensorShape
    grad: _TensorShape
    targets: tuple[int, ...]
    waits: bool

    def work(self, names: Mapping[int, str]) -> WeightWork:
        return WeightWork(_name_of(self.formulas), _known(self.targets, names), self._flops(), self.waits)

    def _flops(self) -> int | None:
        if isinstance(self.formulas, Grouped):
            return _grouped_flops(self.x, self.grad)
        grad, x = self.grad.without_data(), self.x.without_data()
        return _counted(lambda: self.formulas.param_grads(grad, x, len(self.targets) > 1))


@dataclass(frozen=True)
class _OtherUse:
    """A use that is not deferrable, with shapes in place of tensors: it is repeated to count its gradient's FLOPs.

    `place`: the number of the parameter, or of a view of it, among the leaves; None if it is not among them."""

    func: Callable[..., Any]
    parameter: int
    leaves: list[Any]
    spec: Any
    place: int | None

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for a use in the forward and the same use in a recompute."""
        return self.func, self.parameter, self.place, tuple(leaf for leaf in self.leaves if type(leaf) is _TensorShape)

    def work(self, names: Mapping[int, str]) -> WeightWork:
        name = getattr(self.func, "__name__", str(self.func))
        return WeightWork(name, _known((self.parameter,), names), self._flops(), False)

    def _flops(self) -> int | None:
        if self.place is None:
            return None
        if self.func is grouped_mm:
            return _grouped_flops(*self.leaves[:2])
        leaves = [leaf.without_data() if isinstance(leaf, _TensorShape) else leaf for leaf in self.leaves]
        weight = leaves[self.place].requires_grad_()
        args, kwargs = tree_unflatten(leaves, self.spec)
        try:
            results = self.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None  # not every operation runs on the meta device
        outputs = [r for r in tree_flatten(results)[0] if isinstance(r, Tensor) and r.requires_grad]
        return _counted(lambda: torch.autograd.grad(outputs, [weight], [torch.empty_like(o) for o in outputs]))


@dataclass
class Account:
    """The account of one microbatch of one stage."""

    open: bool = False  # true once a microbatch has it, so that no other gets it
    _calls: list[_Call] = field(default_factory=list)
    _others: list[_OtherUse] = field(default_factory=list)
    _in_forward: Counter[Hashable] = field(default_factory=Counter)  # uses that no recompute has repeated yet
    _watched: frozenset[int] = frozenset()  # parameters whose gradients were looked at before and after I
    _grown: frozenset[int] = frozenset()  # watched parameters to whose gradients I has added

    def note_pair(self, pair: Pair, waits: bool) -> None:
        targets = tuple(id(target.parameter) for target in pair.targets)
        self._calls.append(_Call(pair.formulas, _TensorShape.of(pair.x), _TensorShape.of(pair.grad), targets, waits))

    def note_use(
        self, parameter: Tensor, value: Tensor, func: Callable[..., Any], given: tuple[Any, Any], in_backward: bool
    ) -> None:
        """Note a use that is not deferrable. `value`, an argument in `given`, is the parameter or a view of it."""
        leaves, spec = tree_flatten(given)
        place = next((number for number, leaf in enumerate(leaves) if leaf is value), None)
        shapes = [_TensorShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        use = _OtherUse(func, id(parameter), shapes, spec, place)
        if in_backward and self._in_forward[use.likeness] > 0:
            self._in_forward[use.likeness] -= 1  # Rule 2
            return
        if not in_backward:
            self._in_forward[use.likeness] += 1
        self._others.append(use)

    def note_gradients(self, watched: Collection[int], grown: Collection[int]) -> None:
        """Note for which parameters it is known whether I has added to their gradients, and for which it has."""
        self._watched = frozenset(watched)
        self._grown = frozenset(grown)

    def works(self, names: Mapping[int, str]) -> Iterator[WeightWork]:
        """The work of each use, then parameters of which no use was seen. `names`: those of all trained parameters."""
        for call in self._calls:
            yield call.work(names)
        for use in self._others:
            yield use.work(names)
        seen = {target for call in self._calls for target in call.targets} | {use.parameter for use in self._others}
        seen_in_i = {target for call in self._calls if not call.waits for target in call.targets}
        seen_in_i |= {use.parameter for use in self._others}
        for key, name in names.items():
            unseen = key not in seen_in_i if key in self._grown else key not in seen and key not in self._watched
            if unseen:
                yield WeightWork(UNSEEN, (name,), None, False)


def _known(parameters: Iterable[int], names: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(names.get(key, "?") for key in parameters)


def _grouped_flops(rows: _TensorShape, other: _TensorShape) -> int:
    """The FLOPs of the gradient of experts' matrices, for all rows. `other`: the matrices, or the output's gradient.

    torch's counter does not know grouped products, and on the meta device they exist in bf16 only."""
    return 2 * rows.size.numel() * other.size[-1]


def _counted(compute: Callable[[], object]) -> int | None:
    with FlopCounterMode(display=False) as counter:
        try:
            compute()
        except (RuntimeError, NotImplementedError):
            return None
    return int(counter.get_total_flops())


def _name_of(formulas: GradientFormulas) -> str:
    return formulas.name if isinstance(formulas, UserFormulas) else type(formulas).__name__.lower()


def share_of(works: Iterable[WeightWork]) -> float | None:
    """The share of the countable work that waits for W; None if no work can be counted."""
    counted = [work for work in works if work.flops]
    total = sum(work.flops or 0 for work in counted)
    return sum(work.flops or 0 for work in counted if work.waits) / total if total else None


def table(works: Iterable[WeightWork]) -> str:
    """A line about the work that waits for W, and one for each kind of use that does not or that cannot be counted."""
    everything = list(works)
    total = sum(work.flops or 0 for work in everything)
    kinds: dict[tuple[str, str], list[WeightWork]] = {}
    for work in everything:
        if not work.waits:
            kinds.setdefault(("in I", work.what), []).append(work)
        elif work.flops is None:
            kinds.setdefault(("in W", work.what), []).append(work)
    lines = [_headline(everything, total)]
    for (where, what), those in sorted(kinds.items(), key=lambda each: -sum(work.flops or 0 for work in each[1])):
        names = list(dict.fromkeys(name for work in those for name in work.parameters))
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"  {where}: {what}, {_share_of_kind(those, total)}: {shown}")
    return "\n".join(lines)


def _headline(works: Sequence[WeightWork], total: int) -> str:
    """The first line of the table: the share, or a bound of it if some work is unknown (Rule 1)."""
    unknown = {work.waits for work in works if work.flops is None}
    share = share_of(works)
    if share is None:
        reason = "none of it can be counted" if unknown else "there is none that counts"
        return f"no share of the weight gradients' work is known to wait for W: {reason}"
    bound = ""
    if unknown:
        bound = "of what is counted, " if len(unknown) > 1 else "at least " if True in unknown else "at most "
    besides = ", and unknown work besides" if unknown else ""
    return f"{bound}{share:.1%} of the weight gradients' work waits for W ({total:,} FLOPs a microbatch{besides})"


def _share_of_kind(works: Sequence[WeightWork], total: int) -> str:
    if all(work.flops is None for work in works):
        return "unknown"
    share = sum(work.flops or 0 for work in works) / total if total else 0.0
    return f"{share:.1%} and more" if any(work.flops is None for work in works) else f"{share:.1%}"
