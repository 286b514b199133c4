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
        made once, in torch's order. Nor does one with a hook, of any kind, itself or on the view that is used: autograd
        would call it in I, with nothing.
Rule 3: pairs refer to no graph (pairs.py), and their targets to no page (targets.py).
Rule 4: the mode is active in I as well: a recompute of checkpointed blocks must save what the forward saved.
Rule 5: under autocast the casts are part of the graph, where torch has them (casts.py).
Rule 6: inside compiled graphs deferrable calls are tapped (inlined.py), and their pairs come to the same queue.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from retrograde.pages import FullTensor
from retrograde.pipeline.account import Account
from retrograde.pipeline.casts import Casts
from retrograde.pipeline.deferrable import DeferrableCall, parameter_of, recognise
from retrograde.pipeline.formulas import GradientFormulas
from retrograde.pipeline.inlined import ANCHOR, RecordingMode
from retrograde.pipeline.pairs import Pair, add_to_gradients, bytes_of, compact, part_from
from retrograde.pipeline.targets import Target, may_be_target
from retrograde.pipeline.traced import PlainGradient, StageParameters, collecting, keep_graphs_out
from retrograde.torch_internals import (
    Fate,
    alias_without_base,
    base_of,
    body_of,
    fate_of,
    first_gradients,
    has_hooks,
    in_transform,
    is_view,
    run_backward,
    without_modes_or_torch_function,
)


class Waited(NamedTuple):
    """The parameters whose gradients waited in an I, as a repeat needs them (again.py).

    `paired`: those whose gradients wait as pairs again, known by id, since holding a full tensor holds its page."""

    plain: tuple[Tensor, ...] = ()
    paired: frozenset[int] = frozenset()


class SplitBackward:
    """Looks at the forward of one microbatch of one stage, and runs its backward: I and W, or B.

    `parameters`: the stage's, which compiled graphs need. `account` notes which gradients wait and which do not."""

    def __init__(self, parameters: StageParameters | None = None, account: Account | None = None) -> None:
        self._pairs: list[Pair] = []
        self._elsewhere: set[int] = set()  # parameters that something else than a deferrable call uses (Rule 2)
        self._deferring = False
        self._before: dict[int, PlainGradient] = {}  # the gradients of plain parameters when I began, by id
        self._grown: set[int] = set()  # those to which I has added
        self._repeating: Waited | None = None  # in a repeated I, what waited in the first
        self.repeatable = True  # false once a backward has run inside the forward or I
        self.recomputed = False  # was a part of the forward run again in I, as checkpoints do?
        self._casts = Casts()
        self._account = account
        self._parameters = parameters  # kept so that graphs find them
        taps = parameters is not None and not parameters.hooked
        self._mode = RecordingMode(_Recorder(self, account), _BODIES, taps)

    def recording(self) -> TorchFunctionMode:
        """Return the mode, a context in which the forward runs."""
        keep_graphs_out()
        self._casts.clear()
        return self._mode

    def run_inputs(self, outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None]) -> None:
        """Do I: accumulate gradients into the leaves of the graph, except for those that wait for W."""
        self._deferring = True
        self._before = {} if self._parameters is None else self._parameters.gradients()
        try:
            self._run(outputs, grads)
        finally:
            self._deferring = False
        self._part_from_gradients()
        compact(self._pairs)
        before, self._before = self._before, {}
        self._grown = {key for key, gradient in before.items() if gradient.has_grown}
        if self._account is not None:
            self._account.note_gradients(before, self._grown)

    def _part_from_gradients(self) -> None:
        if self._parameters is not None and self._pairs:
            gradients = self._parameters.gradients().values()
            part_from(self._pairs, (g.value for g in gradients if g.value is not None))

    @property
    def in_backward(self) -> bool:
        """Is I running? Then a forward that is looked at is a recompute."""
        return self._deferring

    def run_whole(self, outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None]) -> None:
        """Do B: no gradient waits (Rule 1). Only compiled graphs queue pairs, which are computed at the end."""
        self._run(outputs, grads)
        self.run_weights()

    def _run(self, outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None]) -> None:
        """Run a backward. If it raises, forget its pairs."""
        try:
            with collecting(self):
                _run_engine(self.recording(), outputs, grads)
        except BaseException:
            self._pairs.clear()
            raise
        finally:
            self._casts.clear()

    def run_again(
        self, outputs: Sequence[GradientEdge], grads: Sequence[Tensor], leaves: Sequence[Tensor], waited: Waited
    ) -> None:
        """Do I and W at once in a repeat (again.py), for the gradients that waited in the first I and no others."""
        self._deferring = True
        self._repeating = waited
        try:
            with collecting(self):
                _run_engine(self._mode, outputs, grads, inputs=(*leaves, *waited.plain, ANCHOR))
        finally:
            self._deferring = False
        self.run_weights()

    def run_weights(self) -> None:
        """Do W: add the gradients of the pairs to the parameters' `.grad`, and forget the pairs."""
        pairs, self._pairs = self._pairs, []
        add_to_gradients(pairs)

    def forget(self) -> Waited:
        """Forget the pairs. Returns the parameters whose gradients waited."""
        parameters = {id(t.parameter): t.parameter for pair in self._pairs for t in pair.targets}
        self._pairs.clear()
        # A call's gradients wait together, so either none is paired or all are.
        if any(isinstance(p, FullTensor) or key in self._grown for key, p in parameters.items()):
            return Waited(paired=frozenset(parameters))
        return Waited(plain=tuple(parameters.values()))

    @property
    def waiting(self) -> int:
        """How many pairs wait for W."""
        return len(self._pairs)

    @property
    def waiting_bytes(self) -> int:
        """How many bytes the waiting pairs hold."""
        return bytes_of(self._pairs)

    # ---- the mode and the nodes call these
    def run_nested(self, run: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a backward inside the forward or I, which may add to what I has made a leaf's `.grad`, or I to its."""
        self.repeatable = False
        self._part_from_gradients()
        run(self._mode, *args, **kwargs)
        self._part_from_gradients()

    def note_use(self, parameter: Tensor) -> None:
        self._elsewhere.add(id(parameter))

    def waits(self, target: Target) -> bool:
        """May the gradient of this target wait (Rules 1 and 2)? Asked in the backward of a deferrable call."""
        parameter = target.parameter
        if not parameter.requires_grad or not self._deferring or torch.is_grad_enabled() or target.through_hooks:
            return False
        if self._repeating is not None:
            return id(parameter) in self._repeating.paired
        if id(parameter) in self._elsewhere:
            return False
        if isinstance(parameter, FullTensor):
            return True  # its leaf is behind nodes that sum however often they run
        return not has_hooks(parameter) and fate_of(get_gradient_edge(parameter).node) is Fate.RUNS

    def defer(self, pair: Pair) -> None:
        self._pairs.append(pair)
        for target in pair.targets if self._deferring and self._repeating is None else ():
            parameter = target.parameter  # not the stage's own: the loss's. Autograd adds to a leaf after all its uses
            if isinstance(parameter, nn.Parameter) and not isinstance(parameter, FullTensor):
                self._before.setdefault(id(parameter), PlainGradient.of(parameter))
        if self._account is not None:
            self._account.note_pair(pair, waits=True)

    def computed(self, pair: Pair) -> None:
        """Note that the weight gradient of a deferrable call did not wait."""
        if self._account is not None and self._deferring:
            self._account.note_pair(pair, waits=False)

    def routed(self, call: DeferrableCall, run: Callable[[Tensor], Any]) -> Any:
        """Run a deferrable call as `_Routed`; `run` computes it for a given input."""
        self.recomputed |= self._deferring
        if call.dtype_of_result:
            call, run = _already_run(call, run)
        if call.dtype is None:
            targets = _targets(call)
            return _Routed.apply(self, call, run, targets, call.x, call.weight, call.bias)  # type: ignore[no-untyped-call]
        as_it_is = call.x.dtype == call.dtype or not call.x.is_floating_point()
        x = call.x if as_it_is else self._casts.of_input(call.x, call.dtype)
        given = []
        targets = []
        for tensor in (call.weight, call.bias):
            if tensor is None or tensor.dtype == call.dtype or not tensor.requires_grad:
                given.append(tensor)
                targets += [] if tensor is None or not tensor.requires_grad else [Target(tensor)]
                continue
            cast = self._casts.of_weight(tensor, call.dtype)
            given.append(cast.tensor)
            targets.append(Target(tensor, call.dtype, cast.shared))
        return _Routed.apply(self, call, run, targets, x, *given)  # type: ignore[no-untyped-call]


def _may_wait(call: DeferrableCall) -> bool:
    bias = call.bias
    return may_be_target(call.weight) and (bias is None or not bias.requires_grad or may_be_target(bias))


def _already_run(call: DeferrableCall, run: Callable[[Tensor], Any]) -> tuple[DeferrableCall, Callable[[Tensor], Any]]:
    """Run a user's function under autocast. The dtype of its result is the one in which it has computed."""
    with torch.no_grad():
        result = run(call.x)
    return replace(call, dtype=result.dtype), lambda x: result


def _targets(call: DeferrableCall) -> list[Target]:
    return [Target(tensor) for tensor in (call.weight, call.bias) if tensor is not None and tensor.requires_grad]


class _Recorder:
    """Routes deferrable calls of eager code; leaves everything else as it is."""

    def __init__(self, split: SplitBackward, account: Account | None) -> None:
        self._split = split
        self._account = account

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Inside torch.func autograd Functions need rules that a routed product does not have.
        if in_transform():
            return func(*args, **kwargs)
        if func in _NESTED:
            return self._split.run_nested(_NESTED[func], args, kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in _BODIES:
            with self._split._mode:
                return _BODIES[func](*args, **kwargs)
        call = recognise(func, args, kwargs)
        if call is not None and _may_wait(call):

            def run(x: Tensor) -> Any:
                given = (x if each is call.x else each for each in args)
                return func(*given, **{name: x if each is call.x else each for name, each in kwargs.items()})

            return self._split.routed(call, run)
        result = func(*args, **kwargs)
        self._note(func, result, args, kwargs)
        return result

    def _note(self, func: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not any(isinstance(output, Tensor) and output.requires_grad for output in outputs):
            return  # only asks about a parameter (its shape, its dtype), or copies it without a graph
        for value in _values(args, kwargs):
            parameter = parameter_of(value)
            # A view is not a use yet; what is done with the view will be.
            if parameter is None or all(isinstance(o, Tensor) and base_of(o) is parameter for o in outputs):
                continue
            self._split.note_use(parameter)
            if self._account is not None:
                self._account.note_use(parameter, value, func, (args, kwargs), self._split.in_backward)


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments, and the elements of arguments that are lists, as einsum and recurrent layers take."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += value if isinstance(value, tuple | list) else [value]
    return found


# Functions of torch that hide deferrable calls; their bodies run under the mode.
_BODIES = {F.multi_head_attention_forward: body_of(F.multi_head_attention_forward)}


def _run_engine(
    mode: TorchFunctionMode,
    tensors: Tensor | GradientEdge | Sequence[Tensor | GradientEdge],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do as `torch.autograd.backward`, but keep the mode active, which torch's switches off while it runs (Rule 4)."""
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
        run: Callable[[Tensor], Tensor],
        targets: list[Target],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Run the call. `weight` and `bias` are the call's own, or nodes without data that stand for their casts."""
        ctx.set_materialize_grads(False)
        ctx.split = split
        ctx.formulas = call.formulas
        ctx.dtype = call.dtype
        ctx.targets = tuple(targets)
        ctx.save_for_backward(*((x, call.weight) if x.requires_grad else (x,)))
        out = run(x)
        # An output that is a view could not be changed in place after a custom Function; torch's own can be.
        return alias_without_base(out) if is_view(out) else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 7
        x, *rest = ctx.saved_tensors
        formulas: GradientFormulas = ctx.formulas
        x_grad = None
        weight_grad = None
        bias_grad = None
        # In a backward that is not recorded the mode has nothing to do, and asking it takes longer than the formulas.
        with nullcontext() if torch.is_grad_enabled() else without_modes_or_torch_function():
            if ctx.needs_input_grad[4]:
                weight = rest[0] if ctx.dtype is None else rest[0].to(ctx.dtype)
                x_grad = formulas.input_grad(grad, x, weight)
                del weight
            if all(map(ctx.split.waits, ctx.targets)):
                ctx.split.defer(Pair.of(formulas, x, grad, ctx.targets))
            else:
                ctx.split.computed(Pair.of(formulas, x, grad, ctx.targets))
                weight_grad, bias_grad = formulas.param_grads(grad, x, ctx.needs_input_grad[6])
        return None, None, None, None, x_grad, weight_grad, bias_grad
