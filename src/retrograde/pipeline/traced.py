"""The operator that compiled graphs hand their pairs to (inlined.py), and how it finds parameters.

It runs in the backward of a graph. In I the pair goes to the queue of the microbatch. In any other backward that adds
to `.grad`, the weight gradient is computed at once. In a backward for gradients of inputs alone, nothing is done.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from retrograde.compiling.inlined import KEY, all_code
from retrograde.compiling.regions import hide
from retrograde.errors import PipelineError
from retrograde.parameters import ShardedParameter
from retrograde.pipeline import inlined
from retrograde.pipeline.formulas import (
    Batched,
    Convolution,
    Embedding,
    Geometry,
    GradientFormulas,
    Linear,
    is_column_major,
)
from retrograde.pipeline.inlined import ANCHOR
from retrograde.pipeline.pairs import Pair, add_to_gradients
from retrograde.pipeline.targets import Target
from retrograde.torch_internals import Fate, dynamo_is_loaded, fate_of, has_hooks, hide_from_dynamo, version_of


class Queue(Protocol):
    """Takes the pairs of one microbatch while its I runs."""

    def defer(self, pair: Pair) -> None: ...


class _Queues:
    """The queues of running backwards. Ranks may be threads, each with backwards of its own."""

    def __init__(self) -> None:
        self._by_thread: dict[int, list[Queue]] = {}  # of each the innermost is last

    @contextmanager
    def inside(self, queue: Queue) -> Iterator[None]:
        """Inside, pairs of this thread's graphs go to this queue."""
        own = self._by_thread.setdefault(get_ident(), [])
        own.append(queue)
        try:
            yield
        finally:
            own.pop()
            if not own:
                del self._by_thread[get_ident()]

    def of(self, device: torch.device) -> Queue | None:
        """The innermost queue of this thread; in a thread in which autograd serves a device, the last of all."""
        own = self._by_thread.get(get_ident())
        if own is None and device.type != "cpu":
            own = next(reversed(list(self._by_thread.values())), None)
        return own[-1] if own else None


_queues = _Queues()


@dataclass(frozen=True)
class PlainGradient:
    """The gradient that a plain parameter had at some time."""

    parameter: nn.Parameter
    value: Tensor | None
    version: int

    @staticmethod
    def of(parameter: nn.Parameter) -> "PlainGradient":
        value = parameter.grad
        return PlainGradient(parameter, value, 0 if value is None else version_of(value))

    @property
    def has_grown(self) -> bool:
        """Has anything been added to the gradient since then?"""
        now = PlainGradient.of(self.parameter)
        return now.value is not self.value or now.version != self.version


class StageParameters:
    """The parameters of a stage, with the keys by which graphs know them."""

    def __init__(self, module: nn.Module) -> None:
        own = list(module.parameters())
        self._plain = [weakref.ref(parameter) for parameter in own if not isinstance(parameter, ShardedParameter)]
        for parameter in own:
            key = getattr(parameter, KEY, None)
            # A pickled parameter has the key of the one that was saved.
            if key is None or _parameters.get(int(key)) is not parameter:
                number = next(_numbers)
                setattr(parameter, KEY, torch.tensor([number]))
                _parameters[number] = parameter

    def gradients(self) -> dict[int, PlainGradient]:
        """The gradients of plain parameters, by id. (To read the gradient of a sharded one would reduce it.)"""
        alive = [parameter for reference in self._plain if (parameter := reference()) is not None]
        return {id(parameter): PlainGradient.of(parameter) for parameter in alive}

    @property
    def hooked(self) -> bool:
        """Has a plain parameter a hook? Autograd would call it in I without a gradient, so graphs then do not defer."""
        return any(own is not None and has_hooks(own) for own in (reference() for reference in self._plain))


def keep_graphs_out() -> None:
    """Once Dynamo is loaded, hide all our code from it, as where a frame is skipped the mode runs in the midst of what
    it may compile; and tell it to start no graph in code that is only inlined into graphs."""
    if dynamo_is_loaded():
        hide()
        _keep_graphs_out()


@functools.cache
def _keep_graphs_out() -> None:
    hide_from_dynamo([], all_code(inlined), [])


_numbers = itertools.count()
_parameters: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


def whole_of(parameter: nn.Parameter) -> Tensor:
    """The parameter as forwards see it: the full tensor of a sharded one."""
    if isinstance(parameter, ShardedParameter):
        return parameter.unit.page.full_tensors[parameter.place]
    return parameter


def collecting(queue: Queue) -> AbstractContextManager[None]:
    """Inside, send pairs of graphs to this queue."""
    return _queues.inside(queue)


class _WeightShape(NamedTuple):
    """The shape and strides of a weight when its graph was made; parameters do not change theirs."""

    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(numbers: list[int]) -> "_WeightShape":
        half = len(numbers) // 2
        return _WeightShape(torch.Size(numbers[:half]), tuple(numbers[half:]))

    def like(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, device="meta")


def _convolution(shape: _WeightShape, numbers: list[int]) -> GradientFormulas:
    dims = len(shape.size) - 2
    stride, padding, dilation = (numbers[start * dims : (start + 1) * dims] for start in range(3))
    geometry = Geometry(stride, padding, dilation, False, [0] * dims, numbers[-1])
    return Convolution(geometry, shape.size, shape.stride)


_FORMULAS: dict[str, Callable[[_WeightShape, list[int]], GradientFormulas]] = {
    "linear": lambda shape, _: Linear(True, is_column_major(shape.like().t())),
    "matmul": lambda shape, _: Linear(False, is_column_major(shape.like())),
    "bmm": lambda shape, _: Batched(False),
    "embedding": lambda shape, numbers: Embedding(shape.size[0], numbers[0], bool(numbers[1])),
    "conv": _convolution,
}


class _Copies:
    """Copies of inputs for pairs, as compilers reuse the memory that an operator has read. Uses in a row share one."""

    def __init__(self) -> None:
        self._last: weakref.ref[Pair] | None = None

    def pair(self, formulas: GradientFormulas, x: Tensor, grad: Tensor, targets: tuple[Target, ...]) -> Pair:
        """Make a pair of copies: of the output gradient, and of the input unless the pair before has one."""
        last = None if self._last is None else self._last()
        copy = last.x if last is not None and _are_alike(last.x, x) else x.clone()
        made = Pair.of(formulas, copy, grad.clone(), targets)
        self._last = weakref.ref(made)
        return made


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Have they the same numbers in the same order of memory?"""
    kind = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return kind and one.stride() == torch.empty_like(other, device="meta").stride() and one.equal(other)


_inputs = _Copies()


def _record(
    grad: Tensor, x: Tensor, keys: Tensor, distinct: Tensor, call: str, shape: list[int], numbers: list[int]
) -> Tensor:
    parameters = [whole_of(_parameters[number]) for number in keys.tolist()]
    if fate_of(get_gradient_edge(ANCHOR).node) is Fate.RUNS:
        lower = grad.dtype if grad.dtype != parameters[0].dtype else None
        targets = tuple(Target(parameter, lower) for parameter in parameters)
        formulas = _FORMULAS[call](_WeightShape.of(shape), numbers)
        pair = _inputs.pair(formulas, x, grad, targets)
        queue = _queues.of(grad.device)
        if queue is not None:
            queue.defer(pair)
        else:
            add_to_gradients([pair])
    elif any(fate_of(get_gradient_edge(parameter).node) is not Fate.SKIPPED for parameter in parameters):
        raise PipelineError(
            f"a gradient of a parameter of shape {list(parameters[0].shape)} is asked for in the forward of a "
            f"pipeline's stage, through a compiled graph whose weight gradients wait; do not compile that part"
        )
    return torch.zeros(1)


_library: Any = torch.library
_LIBRARY = _library.Library("retrograde", "FRAGMENT")
_LIBRARY.define(
    "record(Tensor grad, Tensor x, Tensor keys, Tensor distinct, str call, int[] shape, int[] numbers) -> Tensor"
)
_LIBRARY.impl("record", _record, "CompositeExplicitAutograd")
_library.register_fake("retrograde::record", lambda *given: torch.zeros(1), lib=_LIBRARY)
