"""The autograd graph of a unit: two nodes between its leaves and its full tensors.

[Note: the graph of a unit]

    leaf pieces -> Pack -> flat shard -> Gather -> full tensors

Both nodes are made once and live as long as the unit, as AccumulateGrad lives as long as its parameter. The
full tensors are outputs of Gather and are permanent too; what changes is the memory behind them (pages/page.py). So
gradients of all uses of a parameter in one backward, over however many openings of the page, arrive in one input
buffer, in the order in which torch itself would add them, and a unit is reduced once.

Gather has the highest sequence number, so the engine runs it the moment the last gradient has arrived
("this backward needs this page no more"). Pack has the lowest: all Gathers of a backward run before the
first Pack, so reductions are left in flight and collected there.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from retrograde.errors import UnsupportedError
from retrograde.gradients.bucket import Arrived, Grads, lone
from retrograde.gradients.flow import GradientFlow
from retrograde.gradients.landing import landed
from retrograde.pages import FullTensor, Pager, Unit, alive
from retrograde.torch_internals import (
    Fate,
    fate_of,
    raw_grad,
    run_after_all_else,
    run_as_soon_as_ready,
    set_requires_grad,
    without_torch_function,
)
from retrograde.transport import Use, Uses


class Agreement(Protocol):
    """What a graph of gradients needs of the other ranks besides sums."""

    def tensors(self, label: str, value: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the ranks that hold this rank's model together, by shard."""


class UnitGraph:
    """The two nodes of one unit, and what they do in a backward."""

    def __init__(self, unit: Unit, pager: Pager, flow: GradientFlow, agreement: Agreement) -> None:
        self.unit = unit
        self.flow = flow
        self.agreement = agreement
        self.arrived = [False] * len(unit.leaves)  # which leaves the last run of Pack had a gradient for
        self.hooks_ran: set[int] = set()  # in a delivery: the leaves whose hooks have been called, also if one raised
        self._pager = pager
        self._delivering: tuple[bool, ...] | None = None
        self._flat: torch.Tensor | None = None
        self._accumulators: list[Any] = []
        if unit.layout.dtype.is_floating_point or unit.layout.dtype.is_complex:
            self._make_nodes()
        if unit.stays:
            unit.page.count_own_references()  # the flat shard of the graph is one of them

    def _make_nodes(self) -> None:
        with self._accepting(), torch.enable_grad():  # edges for all: a frozen parameter may be unfrozen at any time
            self._flat = _Pack.apply(self, *self.unit.leaves)  # type: ignore[no-untyped-call]
            _Gather.apply(self, self._flat)  # type: ignore[no-untyped-call]
        pack: Any = self._flat.grad_fn
        gather: Any = self.unit.page.full_tensors[0].grad_fn
        self._accumulators = [node for node, _ in pack.next_functions]
        run_after_all_else(pack)
        run_as_soon_as_ready(gather)
        for slot, full in enumerate(self.unit.page.full_tensors):
            torch.Tensor.register_hook(full, partial(_captured, weakref.ref(self), slot, pack))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _accepting(self) -> Iterator[None]:
        """Let frozen parameters take gradients for now:
        one that was pending before the freeze still belongs in `.grad`."""
        frozen = [leaf for leaf, trained in zip(self.unit.leaves, self.unit.trained, strict=True) if not trained]
        for leaf in frozen:
            set_requires_grad(leaf, True)
        try:
            yield
        finally:
            for leaf in frozen:
                set_requires_grad(leaf, False)

    # ---- a backward
    def gathered(self, grads: Arrived) -> torch.Tensor | None:
        """Take the gradients of the unit, all of which have arrived in this backward. Returns what goes on to Pack."""
        unit = self.unit
        alone = lone(grads)  # before anybody here refers to them
        self._pager.retire(unit)
        fates = tuple(self._use_of(slot, grad) for slot, grad in enumerate(grads))
        uses = tuple(Use.NONE if grad is None else fate for fate, grad in zip(fates, grads, strict=True))
        dense = [grad.to_dense() if grad is not None and use else None for grad, use in zip(grads, uses, strict=True)]
        if torch.is_grad_enabled():
            return _Reduce.apply(self, uses, fates, *self._divided(dense, uses))  # type: ignore[no-any-return, no-untyped-call]
        return self.flow.collect(unit, dense, uses, fates, alone)

    def _divided(self, grads: Grads, uses: Uses) -> Grads:
        """Divide the gradients as part of the graph:
        what `.grad` gets is divided, what `torch.autograd.grad` returns is not."""
        divisor = self.flow.divisor
        if divisor == 1 or Use.CAPTURED in uses:
            return grads
        return [None if grad is None else grad / divisor for grad in grads]

    def _use_of(self, slot: int, grad: torch.Tensor | None) -> Use:
        """What the backward that runs does with this parameter's gradient, if there is one."""
        if not self.unit.trained[slot]:
            fate = Fate.SKIPPED
        else:
            fate = fate_of(self._accumulators[slot])
        if fate is Fate.CAPTURED:
            return Use.CAPTURED
        if fate is Fate.RUNS:
            return Use.ACCUMULATED
        if grad is not None and self.unit.page.full_tensors[slot].retains_grad:
            # torch has set it, for good: backward() was given the full tensor
            name = self.unit.layout.slots[slot].name
            raise UnsupportedError(
                f"rank {self.unit.grid.rank}: backward(inputs=...) was given the full tensor of parameter {name}; give "
                f"it the parameter itself, model.get_parameter({name!r})"
            )
        return Use.NONE

    def packed(self, grad: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Cut a reduced gradient into the pieces for the leaves."""
        on_host = None
        present = self._delivering
        if present is None:
            gradient = self.flow.ready_for_pack(self.unit)
            if gradient is None:
                return self.nothing_packed()
            present, on_host = gradient.packed, gradient.at_leaves
        self.arrived = list(present)
        if self.unit.leaves_on_host:
            grad = landed(grad, self.flow.streams) if on_host is None else on_host
            if self._read_at_once():
                self.unit.await_gradients()
        pieces = self._pieces_of(grad)
        return [piece if there else None for piece, there in zip(pieces, present, strict=True)]

    def _read_at_once(self) -> bool:
        """Is what Pack gives read before anybody asks for `.grad`: by a hook, by who captures it, by being added?"""
        if self.unit.hooked or Fate.CAPTURED in map(fate_of, self._accumulators):
            return True
        with without_torch_function():
            return any(raw_grad(leaf) is not None for leaf in self.unit.leaves)

    def _pieces_of(self, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        layout, rank = self.unit.layout, self.unit.rank
        if torch.is_grad_enabled():  # what `split` returns may not be edited in place where it is part of a graph
            return [grad[layout.piece(slot, rank)] for slot in layout.slots]
        # "Unsafe" gives each piece a version counter of its own, so that an edit of one gradient is none of the others.
        # It is one call, as a split into views is, and nobody refers to `grad` any more.
        return grad.unsafe_split_with_sizes(layout.runs(rank))[1::2]

    def nothing_packed(self) -> Sequence[None]:
        self.arrived = [False] * len(self.unit.leaves)
        return [None] * len(self.unit.leaves)

    def captured(self, slot: int, grad: torch.Tensor) -> torch.Tensor:
        """Reduce the gradient of a full tensor for which `torch.autograd.grad` asks, and return all of it."""
        uses = tuple(Use.CAPTURED if index == slot else Use.NONE for index in range(len(self.unit.leaves)))
        grads = [grad.to_dense() if use else None for use in uses]
        shard = _Reduce.apply(self, uses, None, *grads)  # type: ignore[no-untyped-call]
        whole: torch.Tensor = _Regather.apply(self, uses, shard)[slot]  # type: ignore[no-untyped-call]
        return whole.to(grad.dtype)  # the full tensor's, which may be another than the leaf's

    # ---- outside of a backward
    def deliver(self, total: torch.Tensor, wanted: tuple[bool, ...]) -> None:
        """Run Pack for a gradient that no backward of this rank brings. A hook that raises ends its run: the parameters
        without hooks have been served before, and those whose hooks have not run are served by another. The first error
        is raised at the end."""
        hooked = self.unit.hooked_slots()
        self._run_pack(total, tuple(each and not hook for each, hook in zip(wanted, hooked, strict=True)))
        left, errors = tuple(each and hook for each, hook in zip(wanted, hooked, strict=True)), []
        while any(left):
            self.hooks_ran = set()
            try:
                self._run_pack(total, left)
                break
            except Exception as error:
                errors.append(error)
                if not self.hooks_ran:
                    break  # it was no hook that raised
                left = tuple(each and slot not in self.hooks_ran for slot, each in enumerate(left))
        if errors:
            raise errors[0]

    def _run_pack(self, total: torch.Tensor, wanted: tuple[bool, ...]) -> None:
        """Run Pack for these parameters, if there are any."""
        if not any(wanted):
            return
        assert self._flat is not None
        self._delivering = wanted
        try:
            with self._accepting():
                torch.autograd.backward([self._flat], [total])
        finally:
            self._delivering = None

    def regather(self, slot: int, piece: torch.Tensor) -> torch.Tensor:
        """The whole tensor of which `piece` is this rank's part, in the graph to which `piece` belongs."""
        layout = self.unit.layout
        place = layout.piece(layout.slots[slot], self.unit.rank)
        shard = torch.nn.functional.pad(piece, (place.start, self.unit.shard.numel() - place.stop))
        if self.unit.leaves_on_host:
            shard = shard.to(self.unit.page.device)
        present = [index == slot for index in range(len(self.unit.leaves))]
        return _Regather.apply(self, present, shard)[slot]  # type: ignore[no-any-return, no-untyped-call]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: UnitGraph, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.graph = weakref.ref(graph)  # which owns its nodes: a strong reference would keep both for ever
        return graph.unit.flat()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        graph: UnitGraph = alive(ctx.graph)
        pieces = graph.nothing_packed() if grad is None else graph.packed(grad)
        return (None, *pieces)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: UnitGraph, flat: torch.Tensor) -> tuple[FullTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph = weakref.ref(graph)
        return graph.unit.page.full_tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        graph: UnitGraph = alive(ctx.graph)
        return None, graph.gathered(grads)


def _captured(
    reference: "weakref.ref[UnitGraph]", slot: int, pack: Any, grad: torch.Tensor | None
) -> torch.Tensor | None:
    """`torch.autograd.grad(loss, module.weight)` takes a gradient in front of Gather, and nothing behind it runs.

    Called for every parameter of the unit that has a gradient, also for those nobody asked for. (If something behind it
    runs, a parameter of this unit was asked for too, and parameters/handlers.py has seen to it.)"""
    if grad is None or fate_of(pack) is Fate.RUNS:
        return None
    return alive(reference).captured(slot, grad)


# ---- create_graph
class _Reduce(torch.autograd.Function):
    """The reduction as a differentiable operation: its transpose is a gather."""

    @staticmethod
    def forward(ctx: Any, graph: UnitGraph, uses: Uses, fates: Uses | None, *grads: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        ctx.present = [grad is not None for grad in grads]
        return graph.flow.reduce_now(graph.unit, grads, uses, fates)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grads = _Regather.apply(ctx.graph, ctx.present, grad)  # type: ignore[no-untyped-call]
        return (None, None, None, *grads)


class _Regather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: UnitGraph, present: Sequence[bool], shard: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        parts = graph.agreement.tensors(f"the whole of unit {graph.unit.name}", shard.detach().clone)
        views = graph.unit.layout.views(torch.cat(parts))
        return tuple(view if there else None for view, there in zip(views, present, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        uses = tuple(Use.NONE if grad is None else Use.CAPTURED for grad in grads)
        return None, None, _Reduce.apply(ctx.graph, uses, None, *grads)  # type: ignore[no-untyped-call]
