"""One stage on one rank: forward, I, W and B of its microbatches, with detached boundaries.

[Note: what a stage holds]
For a microbatch in flight a stage holds the two ends of its graph and nothing else: the leaves that stand for its
inputs, and the gradient edges of its outputs. Output values live while they are sent, or if the graph has saved them.

    F       makes a flight: leaves, edges, and (if I and W come later) the split backward
    I or B  runs the graph, which frees it, and takes the leaves' gradients; a flight after I is its pairs alone
    W       runs the pairs, and the flight is over
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.devices import HOST
from retrograde.errors import PipelineError
from retrograde.parameters import Owner, ShardedParameter
from retrograde.pipeline.account import Account, WeightWork
from retrograde.pipeline.again import Pending, Recomputed, Repeat, Surroundings, Writes
from retrograde.pipeline.payload import Payload
from retrograde.pipeline.split import SplitBackward
from retrograde.pipeline.traced import StageParameters, whole_of
from retrograde.torch_internals import alias_without_base
from retrograde.transport.messages import TensorLayout

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class WeightedTarget:
    """What the last stage needs for a microbatch's loss: its target, and the weight with which its loss counts.

    `weight`: None if the target does not tell how many samples there are; the share counts that comes with the input.
    """

    value: Any
    weight: float | None


class Phase(Enum):
    """Where a microbatch is in a stage."""

    FORWARD = auto()  # F is done
    INPUTS = auto()  # I is done


@dataclass
class Flight:
    """One microbatch between its F and its W or B."""

    leaves: list[Tensor | None]
    edges: list[GradientEdge | None]
    split: SplitBackward | None  # None if F was not recorded
    seed: list[Tensor | None] | None = None  # on the last stage, the gradient of the loss: its weight
    phase: Phase = Phase.FORWARD
    repeat: Repeat | None = None  # how W can compute the microbatch again instead of holding pairs
    held: int = 0  # bytes of pairs, counted where there is a limit


class _Made(NamedTuple):
    """What F has made: the flight, and output and loss in their graph."""

    flight: Flight
    output: Any
    loss: Tensor | None  # on the last stage, if there is a target


class _Computed(NamedTuple):
    """What a forward has made, in its graph. `wrote`: it was watched, and has changed what it was given or a buffer."""

    leaves: list[Tensor | None]
    output: Any
    loss: Tensor | None
    wrote: bool


class WeightedLoss(NamedTuple):
    """The loss of a microbatch, as the loss function returned it, and the weight with which it counts."""

    value: Tensor
    weight: float


class LastOutput(NamedTuple):
    """What F of the last stage returns, detached; the loss is None without a target."""

    loss: WeightedLoss | None
    output: Any


@dataclass
class Stage:
    """One stage on one rank. It calls `module` with what arrives (a tuple: several arguments) and accepted keywords."""

    index: int
    module: nn.Module
    loss: Loss | None = None  # on the last stage
    split: Collection[int] = frozenset()  # the microbatches whose backward is I and, later, W; that of others is B
    flights: dict[int, Flight] = field(default_factory=dict)
    pages: dict[Owner, Tensor] = field(default_factory=dict)  # from GATHER to DROP
    account: Account = field(default_factory=Account)  # about the first microbatch whose backward was split
    pending: Pending = field(default_factory=Pending)  # shared by the stages of a rank
    device: torch.device = HOST

    def __post_init__(self) -> None:
        self._recomputes: bool | None = None  # did the last I compute activations again?
        self._parameters = StageParameters(self.module)
        parameters = inspect.signature(self.module.forward).parameters.values()
        self._accepts = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL}
        self._accepts_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def forward(self, microbatch: int, arrived: Payload, options: Mapping[str, Any]) -> Payload:
        """Do F of a stage that is not the last. Returns its output, detached."""
        made = self._start_flight(microbatch, arrived, options)
        payload = Payload.of(made.output, arrived.layout.share)
        made.flight.edges = [_edge(tensor) for tensor in payload.tensors]
        self._keep(microbatch, made.flight)
        return Payload(payload.layout, [None if t is None else t.detach() for t in payload.tensors])

    def forward_last(
        self, microbatch: int, arrived: Payload, options: Mapping[str, Any], target: WeightedTarget | None
    ) -> LastOutput:
        """Do F of the last stage, which computes the loss if there is a target."""
        made = self._start_flight(microbatch, arrived, options, target)
        payload = Payload.of(made.output)
        detached = payload.tree([None if t is None else t.detach() for t in payload.tensors])
        loss = made.loss
        if loss is None or target is None:
            return LastOutput(None, detached)
        if loss.numel() != 1:
            raise PipelineError(f"stage {self.index}: the loss must be one number, it has shape {list(loss.shape)}")
        weight = arrived.layout.share if target.weight is None else target.weight
        made.flight.edges = [_edge(loss)]
        made.flight.seed = [torch.full_like(loss, weight, requires_grad=False)]
        self._keep(microbatch, made.flight)
        value = loss.detach().clone()  # a clone, as a loss may be a view of something large
        return LastOutput(WeightedLoss(value, weight), detached)

    def backward(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Do B, the whole backward. Returns the gradients of what arrived."""
        flight = self._take(microbatch, Phase.FORWARD, "B")
        roots, given = self._roots(flight, grads)
        if roots:
            with self._as_computed():
                if flight.split is None:
                    torch.autograd.backward(roots, given)
                else:
                    flight.split.run_whole(roots, given)
        return _take_grads(flight)

    def backward_inputs(self, microbatch: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Do I. Returns the gradients of what arrived; weight gradients wait for W."""
        flight = self._take(microbatch, Phase.FORWARD, "I")
        if flight.split is None:
            raise PipelineError(f"stage {self.index}, microbatch {microbatch}: I after a forward that was not split")
        output_grads = flight.seed if flight.seed is not None else grads
        assert output_grads is not None
        roots, given = self._roots(flight, grads)
        if roots:
            with self._as_computed():
                flight.split.run_inputs(roots, given)
        self._hold_less(flight, flight.split, output_grads)
        found = _take_grads(flight)
        flight.phase = Phase.INPUTS
        self.flights[microbatch] = flight
        return found

    def backward_weights(self, microbatch: int) -> None:
        """Do W, from the pairs or by computing the microbatch again."""
        flight = self._take(microbatch, Phase.INPUTS, "W")
        assert flight.split is not None
        self.pending.held -= flight.held
        with self._as_computed():
            if flight.repeat is not None:
                flight.repeat.run(SplitBackward(self._parameters))
            else:
                flight.split.run_weights()

    def gather(self) -> None:
        """Do GATHER: hold a sharded stage's pages until DROP. Without it, each page comes and goes with its use."""
        leaves = [leaf for leaf in self.module.parameters() if isinstance(leaf, ShardedParameter)]
        self.pages = {leaf.owner: leaf.shown() for leaf in leaves}

    def drop(self) -> None:
        owners = list(self.pages)
        self.pages.clear()
        for owner in owners:
            owner.retire_page()

    def works(self) -> Iterator[WeightWork]:
        """The work of the weight gradients, by use (account.py)."""
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        yield from self.account.works({id(whole_of(p)): name.removeprefix("blocks.") for name, p in trained.items()})

    def clear(self) -> None:
        """Forget what a failed step has left."""
        self.flights.clear()
        self.pending.held = 0
        self.drop()

    def _start_flight(
        self, microbatch: int, arrived: Payload, options: Mapping[str, Any], target: WeightedTarget | None = None
    ) -> _Made:
        flight = Flight([], [], self._recorder(microbatch))
        split_here = flight.split is not None and microbatch in self.split
        if split_here and self.pending.may_lack_room(self._recomputes):
            flight.repeat = self._repeat(arrived, options, target)
        computed = self._compute(arrived, options, target, flight.split, watched=flight.repeat is not None)
        flight.leaves = computed.leaves
        if computed.wrote:
            flight.repeat = None
        return _Made(flight, computed.output, computed.loss)

    def _compute(
        self,
        arrived: Payload,
        options: Mapping[str, Any],
        target: WeightedTarget | None,
        split: SplitBackward | None,
        watched: bool = False,
    ) -> _Computed:
        """Run the forward; if `watched`, find out whether it writes to what it is given or to buffers."""
        leaves: list[Tensor | None] = [None] * len(arrived.tensors)
        if torch.is_grad_enabled():
            leaves = [_leaf(*pair) for pair in zip(arrived.tensors, arrived.layout.tensors, strict=True)]
        # The module gets aliases and not the leaves, so that it can change them in place as in a whole model.
        pairs = zip(arrived.tensors, leaves, strict=True)
        entered = [t if leaf is None else alias_without_base(leaf) for t, leaf in pairs]
        args = arrived.tree(entered)
        kwargs = {k: v for k, v in options.items() if self._accepts_all or k in self._accepts}
        value = None if target is None else target.value
        written = Writes.watch(self.module, entered, kwargs, value) if watched else None
        del entered, arrived  # the graph and the leaves hold what is needed
        args = args if isinstance(args, tuple) else (args,)
        with nullcontext() if split is None else split.recording():
            output = self.module(*args, **kwargs)
            loss = None
            if self.loss is not None and target is not None:
                given = () if value is None else (value,)
                loss = self.loss(output, *given)
        return _Computed(leaves, output, loss, written is not None and written.happened)

    def _repeat(self, arrived: Payload, options: Mapping[str, Any], target: WeightedTarget | None) -> Repeat:
        def forward(split: SplitBackward) -> Recomputed:
            computed = self._compute(arrived, options, target, split)
            outputs = [computed.loss] if computed.loss is not None else Payload.of(computed.output).tensors
            return Recomputed([leaf for leaf in computed.leaves if leaf is not None], [_edge(t) for t in outputs])

        inputs = [t for t, layout in zip(arrived.tensors, arrived.layout.tensors, strict=True) if _wanted(t, layout)]
        return Repeat([t for t in inputs if t is not None], forward, Surroundings.now(self.device))

    def _hold_less(self, flight: Flight, split: SplitBackward, output_grads: Sequence[Tensor | None]) -> None:
        """After I, hold the pairs, or what W needs to compute them again (again.py)."""
        repeat, flight.repeat = flight.repeat, None
        self._recomputes = split.recomputed
        waiting = split.waiting_bytes
        has_room = self.pending.has_room(waiting, split.recomputed)
        if repeat is not None and split.repeatable and repeat.inputs and not has_room:
            repeat.grads = list(output_grads)
            if repeat.bytes < waiting:
                repeat.waited = split.forget()
                flight.repeat = repeat
                return
        flight.held = waiting
        self.pending.held += waiting

    def _as_computed(self) -> AbstractContextManager[object]:
        """Switch autocast off for a backward, in which it would lower what the forward computed in full precision."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _recorder(self, microbatch: int) -> SplitBackward | None:
        """The split backward that looks at the operations of a forward; None if it is not needed.

        A microbatch whose backward is B needs it in two cases. If other microbatches of the stage are split, compiled
        regions need one graph for all of them: a second one would be made in the middle of the step. And under autocast
        torch would keep a cast of every weight until B, and share none of a full tensor's, which is no leaf (casts.py).
        """
        if not torch.is_grad_enabled():
            return None
        if microbatch in self.split:
            return SplitBackward(self._parameters, self._account_of_first())
        if self.split:
            return SplitBackward(self._parameters)
        return SplitBackward() if torch.is_autocast_enabled(self.device.type) else None

    def _account_of_first(self) -> Account | None:
        """Open the account for the first microbatch that is split; None for every other."""
        if self.account.open:
            return None
        self.account.open = True
        return self.account

    def _keep(self, microbatch: int, flight: Flight) -> None:
        if microbatch in self.flights:
            raise PipelineError(f"stage {self.index}: F of microbatch {microbatch} twice in one step")
        if torch.is_grad_enabled():
            self.flights[microbatch] = flight

    def _take(self, microbatch: int, phase: Phase, what: str) -> Flight:
        flight = self.flights.get(microbatch)
        if flight is None or flight.phase is not phase:
            state = "has no forward" if flight is None else f"is after {flight.phase.name.lower()}"
            raise PipelineError(f"stage {self.index}: {what} of microbatch {microbatch}, which {state}")
        return self.flights.pop(microbatch)

    def _roots(self, flight: Flight, grads: Sequence[Tensor | None] | None) -> tuple[list[GradientEdge], list[Tensor]]:
        edges, flight.edges = flight.edges, []
        given = flight.seed if flight.seed is not None else grads
        flight.seed = None
        assert given is not None
        pairs = [(e, g) for e, g in zip(edges, given, strict=True) if e is not None and g is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]


def _leaf(tensor: Tensor | None, layout: TensorLayout | None) -> Tensor | None:
    """Make a tensor that arrived a leaf that collects a gradient; None if the stage before wants none."""
    return tensor.requires_grad_() if tensor is not None and _wanted(tensor, layout) else None


def _wanted(tensor: Tensor | None, layout: TensorLayout | None) -> bool:
    return tensor is not None and layout is not None and layout.requires_grad


def _edge(tensor: Tensor | None) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor is not None and tensor.requires_grad else None


def _take_grads(flight: Flight) -> list[Tensor | None]:
    leaves, flight.leaves = flight.leaves, []
    grads = [None if leaf is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
    return grads
