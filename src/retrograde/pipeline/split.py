"""The split backward: input gradients now (I), weight gradients later (W), and nothing kept but what W reads.

[Note: split backward]
During the forward of a microbatch a torch-function mode looks at every operation. A deferrable call
(deferrable.py) runs as `_Routed`, an autograd Function whose backward computes the gradient of its input and hands
the pair (input, output gradient) to this microbatch's queue. I is an ordinary `backward()`: it runs each node
once and frees the graph as it goes. W is another ordinary `backward()` over one small node per pair, so that
sums over several uses, hooks of the leaf, the layout of `.grad` and accumulation are torch's own.

Rule 1: a weight gradient waits only while I runs, and only if I would add it to the leaf's `.grad`. A gradient
        that a nested `autograd.grad` asks for, or that a backward inside the forward makes, is computed at once.
Rule 2: a parameter that is also used by something that is not deferrable does not wait: its gradient is one sum,
        made once, in torch's order. Nor does one with a hook, of any kind: autograd would call it in I, with nothing.
Rule 3: pairs refer to no graph. Inputs are kept detached, with their version, which W checks as autograd would.
Rule 4: the mode is active in I as well: a recompute of checkpointed blocks must save what the forward saved.
Rule 5: nodes of W are made in the opposite order of I, because autograd runs the youngest first: weights that are
        used twice are summed in the order in which I met them, as in an unsplit backward.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from retrograde.errors import PipelineError
from retrograde.pages import FullTensor, Unit
from retrograde.pipeline.deferrable import DeferrableCall, GradientFormulas, ParamGrads, parameter_of, recognise
from retrograde.torch_internals import (
    Fate,
    alias_without_base,
    base_of,
    fate_of,
    first_gradients,
    has_hooks,
    in_transform,
    is_view,
    run_backward,
    storage_id,
    storage_users,
    version_of,
    without_modes_or_torch_function,
)


class _Target:
    """A parameter whose gradient waits. A full tensor is found again by its place: holding it would hold its page."""

    __slots__ = ("_slot", "_tensor", "_unit")

    def __init__(self, tensor: Tensor) -> None:
        paged = isinstance(tensor, FullTensor)
        self._tensor = None if paged else tensor
        self._unit: weakref.ref[Unit] | None = tensor._unit if isinstance(tensor, FullTensor) else None
        self._slot = tensor._slot if isinstance(tensor, FullTensor) else 0

    @property
    def tensor(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        unit = self._unit() if self._unit is not None else None
        if unit is None:
            raise PipelineError("W of a stage whose sharded model is gone; keep the model until the step has ended")
        return unit.page.full_tensors[self._slot]


@dataclass(slots=True)
class _Pair:
    """What W reads of one deferrable call: its input and its output's gradient."""

    formulas: GradientFormulas
    x: Tensor
    version: int
    grad: Tensor
    targets: tuple[_Target, ...]

    def compute(self) -> ParamGrads:
        version = version_of(self.x)
        if version != self.version:
            raise PipelineError(
                f"the input of a {type(self.formulas).__name__.lower()} ({list(self.x.shape)}) was changed in place "
                f"between I and W: it is at version {version}, I saw version {self.version}; do not "
                f"write to tensors that a stage computed before the step has ended"
            )
        return self.formulas.param_grads(self.grad, self.x, len(self.targets) > 1)


class SplitBackward:
    """Forward, I and W of one microbatch of one stage."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._elsewhere: set[int] = set()  # parameters that something else than a deferrable call uses (Rule 2)
        self._deferring = False

    def recording(self) -> TorchFunctionMode:
        """A context for the forward."""
        return _Recorder(self)

    def run_inputs(self, outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None]) -> None:
        """I: accumulates into the leaves of the graph, except for what waits for W."""
        self._deferring = True
        try:
            _run_engine(self.recording(), outputs, grads)
        except BaseException:
            self._pairs.clear()
            raise
        finally:
            self._deferring = False
        self._compact()

    def run_weights(self) -> None:
        """W: adds what was left to the parameters' `.grad`, and holds nothing afterwards."""
        pairs, self._pairs = self._pairs, []
        tokens = []
        with torch.enable_grad():
            while pairs:
                pair = pairs.pop()  # Rule 5
                targets = [target.tensor for target in pair.targets]
                token = _Waiting.apply(pair, *targets)  # type: ignore[no-untyped-call]
                if token.requires_grad:  # a parameter may have been frozen since
                    tokens.append(token)
                del pair
        if tokens:
            torch.autograd.backward(tokens, [token.detach() for token in tokens])

    @property
    def waiting_bytes(self) -> int:
        """Bytes that W reads, each once."""
        storages = {storage_id(t): t.untyped_storage().nbytes() for p in self._pairs for t in (p.x, p.grad)}
        return sum(storages.values())

    # ---- the mode and the nodes call these
    def note_use(self, parameter: Tensor) -> None:
        self._elsewhere.add(id(parameter))

    def waits(self, target: Tensor, node: Any) -> bool:
        """Rules 1 and 2, asked in the backward of a deferrable call. `node` is where the target's gradient would go."""
        parameter = parameter_of(target)
        if parameter is None or not self._deferring or torch.is_grad_enabled():
            return False
        if id(parameter) in self._elsewhere:
            return False
        if isinstance(parameter, FullTensor):
            return True  # its leaf is behind nodes that sum however often they run
        if has_hooks(parameter):
            return False
        return fate_of(node if target is parameter else get_gradient_edge(parameter).node) is Fate.RUNS

    def defer(self, formulas: GradientFormulas, x: Tensor, grad: Tensor, targets: tuple[_Target, ...]) -> None:
        self._pairs.append(_Pair(formulas, x.detach(), version_of(x), grad.detach(), targets))

    def _compact(self) -> None:
        """A view that keeps a larger storage alive is copied out of it, unless somebody else keeps it anyway."""
        views: dict[int, list[Tensor]] = {}
        for pair in self._pairs:
            for tensor in (pair.x, pair.grad):
                views.setdefault(storage_id(tensor), []).append(tensor)
        loose = set()
        for storage, tensors in views.items():
            distinct = {(t.storage_offset(), t.size(), t.stride()): t.nbytes for t in tensors}
            total = tensors[0].untyped_storage().nbytes()
            if sum(distinct.values()) < total and storage_users(tensors[0]) <= len(tensors):
                loose.add(storage)
        if not loose:
            return
        copies: dict[Any, Tensor] = {}
        for pair in self._pairs:
            if storage_id(pair.x) in loose:
                pair.x = _copied(pair.x, copies)
                pair.version = 0
            if storage_id(pair.grad) in loose:
                pair.grad = _copied(pair.grad, copies)


def _copied(view: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    """One copy for equal views; its version starts at 0."""
    place = (storage_id(view), view.storage_offset(), view.size(), view.stride())
    if place not in copies:
        copies[place] = view.clone()
    return copies[place]


class _Recorder(TorchFunctionMode):
    """Routes deferrable calls; leaves everything else as it is."""

    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Inside torch.func autograd Functions need rules that a routed product does not have.
        if torch.compiler.is_compiling() or in_transform():
            return func(*args, **kwargs)
        if func is torch.autograd.backward or func is Tensor.backward:
            return _NESTED[func](self, *args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        call = recognise(func, args, kwargs)
        if call is not None and not torch.is_autocast_enabled(call.weight.device.type):
            return _Routed.apply(  # type: ignore[no-untyped-call]
                self._split, call, lambda: func(*args, **kwargs), call.x, call.weight, call.bias
            )
        result = func(*args, **kwargs)
        self._note(result, args, kwargs)
        return result

    def _note(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(output, Tensor) for output in outputs):
            return  # a question about a parameter (its shape, its dtype)
        for value in (*args, *kwargs.values()):
            parameter = parameter_of(value)
            # A view is not a use yet; what is done with the view will be.
            if parameter is not None and not (isinstance(result, Tensor) and base_of(result) is parameter):
                self._split.note_use(parameter)


def _run_engine(
    mode: TorchFunctionMode,
    tensors: Tensor | GradientEdge | Sequence[Tensor | GradientEdge],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`, which as a torch function would switch the mode off while it runs (Rule 4)."""
    roots = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
    given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors or [None] * len(roots))
    leaves = (inputs,) if isinstance(inputs, Tensor | GradientEdge) else tuple(inputs or ())
    seeds = first_gradients(roots, given)
    with mode:
        run_backward(roots, seeds, create_graph if retain_graph is None else retain_graph, create_graph, leaves)


def _run_tensor(
    mode: TorchFunctionMode,
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    _run_engine(mode, (tensor,), (gradient,), retain_graph, create_graph, inputs)


_NESTED: dict[Any, Callable[..., None]] = {torch.autograd.backward: _run_engine, Tensor.backward: _run_tensor}


class _Routed(torch.autograd.Function):
    """A deferrable call: the same forward, and a backward whose weight gradient may wait."""

    @staticmethod
    def forward(
        ctx: Any,
        split: SplitBackward,
        call: DeferrableCall,
        run: Callable[[], Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.split = split
        ctx.formulas = call.formulas
        ctx.targets = tuple(_Target(t) for t in (weight, bias) if t is not None and t.requires_grad)
        ctx.save_for_backward(*((x, weight) if x.requires_grad else (x,)))
        out = run()
        # An output that is a view could not be changed in place after a custom Function; torch's own can be.
        return alias_without_base(out) if is_view(out) else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 6
        x, *rest = ctx.saved_tensors
        formulas: GradientFormulas = ctx.formulas
        edges = zip(ctx.next_functions[1:], ctx.needs_input_grad[4:], strict=False)  # no bias, no edge
        nodes = [node for (node, _), needed in edges if needed]
        # The mode has nothing to see in a backward that is not recorded, and asking it takes longer than the formulas.
        with nullcontext() if torch.is_grad_enabled() else without_modes_or_torch_function():
            x_grad = formulas.input_grad(grad, x, rest[0]) if ctx.needs_input_grad[3] else None
            weight_grad = None
            bias_grad = None
            if all(ctx.split.waits(target.tensor, node) for target, node in zip(ctx.targets, nodes, strict=True)):
                ctx.split.defer(formulas, x, grad, ctx.targets)
            else:
                weight_grad, bias_grad = formulas.param_grads(grad, x, ctx.needs_input_grad[5])
        return None, None, None, x_grad, weight_grad, bias_grad


class _Waiting(torch.autograd.Function):
    """The node of a pair in W. Its output carries no data; its backward makes the gradients."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.pair = pair
        return pair.grad.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Any:
        pair, ctx.pair = ctx.pair, None
        weight, bias = pair.compute()
        return (None, weight, bias) if len(pair.targets) > 1 else (None, weight)
