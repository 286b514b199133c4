"""The engine: the parts of one sharded model, wired together, and what users ask of them."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from retrograde.arguments import flag, instance, not_negative, number, whole_number, wrong
from retrograde.coordination import Coordinator, WriteFence
from retrograde.coordination.meetings import Meetings
from retrograde.devices import Streams
from retrograde.engine.growth import growth
from retrograde.engine.named_state import named_state, names_of, numbered_state
from retrograde.engine.units import UnitMemory
from retrograde.errors import ShardingError
from retrograde.gradients import (
    BackendSum,
    Backwards,
    CallKind,
    CollectiveSum,
    Deliveries,
    Exchange,
    ExchangeOfSums,
    GradientFlow,
    Keys,
    OrderedSum,
    PendingGradients,
    Reducer,
    Strategy,
    UnitGraph,
    Windows,
)
from retrograde.layout import Grid, Policy, parse_bytes
from retrograde.ledger import Ledger
from retrograde.pages import BufferPool, PageGathering, Pager, SavedTensors, Unit
from retrograde.parameters import Owner, ShardedParameter
from retrograde.parameters.casting import CastAround, cast_around
from retrograde.parameters.part import together
from retrograde.parameters.wholes import plain
from retrograde.reports import explain, report
from retrograde.torch_internals import raw_grad, set_data, without_torch_function
from retrograde.transport import Memory, Transport
from retrograde.transport.collective import CollectiveTransport

EngineTransport = CollectiveTransport | Transport
_A_RANK = "a rank of this engine's process group, or None"


def _strategy(transport: EngineTransport, grid: Grid, policy: Policy, buckets: BufferPool) -> Strategy:
    one_by_one = OrderedSum(transport, grid, policy, buckets)
    if not isinstance(transport, CollectiveTransport):
        return one_by_one
    streams = buckets.streams
    apart: CallKind = Exchange(transport)
    if grid.replicas > 1:
        apart = ExchangeOfSums(transport, grid, policy, streams.reducing)
    usual = apart if policy.exact or streams.on_host else BackendSum(transport)
    return CollectiveSum(transport, policy, buckets, one_by_one, usual, apart)


class Engine:
    """The parts of one sharded model, made by `shard()`.
    The model's modules hold it, so it lives as long as the model."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        streams: Streams,
        transport: EngineTransport,
        grid: Grid,
        fence: WriteFence,
        enlist_added: Callable[["Engine"], None],
        copy_model: Callable[[dict[int, Any]], nn.Module],
    ) -> None:
        """Wire the parts together. Only this place knows which class stands behind which door."""
        self.model = model
        self.grow = growth(lambda: enlist_added(self))  # shards parameters that have joined the model meanwhile
        self.copy_model = copy_model
        self.policy = policy
        self.device = streams.device
        self.transport = transport
        self.grid = grid
        self.units: list[Unit] = []
        self.ledger = Ledger()
        self.pages = BufferPool(Memory.PAGE, transport, streams, self.ledger)
        self.buckets = BufferPool(Memory.BUCKET, transport, streams, Ledger())  # the user's ledger is about pages
        ordered = transport if isinstance(transport, CollectiveTransport) else None
        meetings = Meetings(transport, self.ledger, streams, ordered)
        self._strategy = _strategy(transport, grid, policy, self.buckets)
        gathering = None if ordered is None else PageGathering(ordered, self.pages)
        self._windows = Windows()
        self._deliveries = Deliveries()
        keys = Keys(transport)
        reducer = Reducer(grid, self.units, policy, self._strategy, self.buckets, self.ledger)
        backwards = Backwards(transport, self.units, keys, self._strategy, reducer, self._deliveries, meetings.meet)
        self.pending = PendingGradients(policy, self._windows, keys, reducer)
        self.flow = GradientFlow(grid, self.buckets, self._strategy, reducer, self._deliveries, backwards, self.pending)
        self.pager = Pager(policy, self.pages, backwards.recover, lambda: 0 if ordered is None else ordered.detours)
        self.coordinator = Coordinator(transport, grid, meetings, fence, self.flow, self.pager, gathering)
        self.saved = SavedTensors(self.pager)
        self.saves_shards = False
        self._fence = fence
        self._owners: list[Owner] = []

    def enlist(self, made: Sequence[UnitMemory]) -> None:
        """Make units of memory that has its values, with a graph, and make their parameters leaves of it."""
        for memory in made:
            self._enlist(memory)
        sizes = sorted((unit.layout.page_bytes for unit in self.units), reverse=True)
        self.pages.limit = sum(sizes[: 2 if self.policy.prefetch else 1]) + self.policy.resident
        self.buckets.limit = self._strategy.buffers * sum(sorted(map(self.pending.waiting_bytes, self.units))[-2:])
        self.coordinator.values("shard() is done", lambda: None)  # from here on others may read our shards

    def _enlist(self, made: UnitMemory) -> None:
        index = len(self.units)
        leaves = [param for _, param in made.spec.params]
        unit = Unit(
            index,
            made.spec.name,
            made.layout,
            leaves,
            made.memory,
            self.grid,
            self.pages,
            self.coordinator,
            made.masters,
        )
        graph = UnitGraph(unit, self.pager, self.flow, self.coordinator)
        owner = Owner(unit, self.coordinator, self.pager, self.flow, self.pending, graph)
        self.units.append(unit)
        self._deliveries.add(graph)
        self.saved.watch(unit)
        self._owners.append(owner)
        for place, leaf in enumerate(unit.leaves):
            ShardedParameter.adopt(leaf, owner, place)
        self._fence.add(unit)

    def cast_around(self, module: nn.Module) -> CastAround | None:
        """The dtypes in which this module takes its arguments and gives its results; None if that is its own affair."""
        return cast_around(module, module is self.model, self.policy.precision)

    # ---- users
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside; the next backward outside takes them along."""
        self.flow.recover()
        with self._windows.window(math.inf):
            yield

    @contextlib.contextmanager
    def coalesce(self, budget: int | float | str | None = None) -> Iterator[None]:
        """Keep the gradients of the backwards inside and reduce them once, at the end.

        `budget`: how many bytes of them may wait; what does not fit is reduced early, in its backward (0: everything).
        At stage 1 the end is the step, as always. If the body raises nothing is reduced and what was kept stays
        pending, as it would in `.grad`.
        """
        limit = math.inf if budget is None else parse_bytes(budget, "coalesce(budget)")
        self.flow.recover()
        if sum(self.pending.bytes_waiting.values()) > limit:
            self.coordinator.flush_pending_gradients("the start of coalesce(budget=...)")
        with self._windows.window(limit):
            yield
        if not self._windows.open and not self.policy.until_step:
            self.coordinator.end_window("the end of coalesce()")

    @property
    def gradient_divisor(self) -> float:
        """What a backward adds to `.grad` is divided by this, on this rank; 1 unless it is set.

        For gradients that are to be a mean over several backwards. Whatever a backward is, and wherever it starts: its
        own part of the gradients is divided once. What `torch.autograd.grad` returns is not."""
        return self.flow.divisor

    @gradient_divisor.setter
    def gradient_divisor(self, value: float) -> None:
        divisor = not_negative("gradient_divisor", value, "a number above 0")
        if divisor == 0 or math.isinf(divisor):
            raise wrong("gradient_divisor", value, "divides nothing", "a number above 0")
        self.flow.divisor = divisor

    @contextlib.contextmanager
    def full_params(
        self, *modules: nn.Module, write: bool = False, writer: int | None = None, leaves: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The full tensors of the given modules (all, if none is given), by name, held while inside.

        With `write=True` edits in place are allowed, and every rank makes the same ones. With `writer` the edits of
        that rank count alone, and all ranks have them at the end: it is for all ranks together, at both ends.
        `leaves=True`, which `writer` implies: `p` itself is its full tensor, of which a rank may ask anything alone."""
        write = flag("full_params(write)", write) or writer is not None
        leaves = flag("full_params(leaves)", leaves) or writer is not None
        if writer is not None and whole_number("full_params(writer)", writer, 0, _A_RANK) >= self.grid.world:
            raise wrong("full_params(writer)", writer, f"is not one of {self.grid.world} ranks", _A_RANK)
        wanted = {id(p) for module in self._own(modules) for p in module.parameters()}
        chosen = [(name, p) for name, p in self.model.named_parameters() if id(p) in wanted]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not write):
            held = {name: leaf.shown() for name, leaf in chosen if isinstance(leaf, ShardedParameter)}
            with contextlib.ExitStack() as manners:
                if writer is not None:
                    manners.enter_context(self._edited_by(writer, held))
                if leaves:
                    manners.enter_context(self._leaves_whole(held))
                yield held if write else {name: tensor.detach() for name, tensor in held.items()}
        held.clear()
        for unit in self.units:
            unit.write_back_edits()
        self.pager.release()

    @contextlib.contextmanager
    def _leaves_whole(self, held: Collection[str]) -> Iterator[None]:
        before = {unit: unit.whole_leaves for unit in self.units}  # such spans nest
        for unit in before:
            unit.whole_leaves = unit.whole_leaves | unit.layout.slots_named(held)
        try:
            yield
        finally:
            for unit, slots in before.items():
                unit.whole_leaves = slots

    @contextlib.contextmanager
    def _edited_by(self, writer: int, held: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let each rank edit these full tensors alone. At the end all ranks make one edit of each, with the writer's
        values.

        Edits that were made before the body raises count, as they do in torch."""
        for unit in self.units:
            unit.write_back_edits()
        self.coordinator.values("full_params(writer=...) begins", lambda: None)  # all have read what they hold
        for unit in self.units:
            unit.edited_alone = unit.layout.slots_named(held)
        try:
            yield
        finally:
            for unit in self.units:
                unit.end_editing_alone()
            for name, tensor in held.items():
                tensor.copy_(self._from_rank(writer, f"full_params(writer={writer}): {name}", tensor))

    def _from_rank(self, rank: int, label: str, tensor: torch.Tensor) -> torch.Tensor:
        """Bring the tensor of one rank to all ranks."""
        everybody = self.coordinator.values(label, lambda: tensor.detach().clone() if rank == self.grid.rank else None)
        return cast(torch.Tensor, everybody[rank])

    def _own(self, modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
        """The modules asked for, each with something of this model; all of it if none is given."""
        fix = "modules of this model, or none for all of it"
        known = {id(part) for part in (*self.model.modules(), *self.model.parameters())}
        for module in modules:
            instance("full_params(modules)", module, nn.Module, "is not a module", fix)
            if known.isdisjoint(id(part) for part in (*module.modules(), *module.parameters())):
                raise wrong("full_params(modules)", module, "is not part of this model", fix)
        return modules or (self.model,)

    def iter_full_params(self, budget: int | str = "1GiB") -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, full tensor), a unit at a time; a tensor is valid until the next one is asked for.

        `budget`: what pages may take at any time, the one that is read ahead included."""
        return self._stream(budget, parse_bytes(budget, "iter_full_params(budget)"))

    def _stream(self, budget: int | str, limit: float) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = sorted(unit.layout.page_bytes for unit in self.units)
        ahead = sizes[-1] if self.policy.prefetch and len(sizes) > 1 else 0
        for unit, following in zip(self.units, [*self.units[1:], None], strict=True):
            need = unit.layout.page_bytes
            if need + ahead > limit and not unit.stays:
                beside = f", and the page that is read ahead {ahead}" if ahead else ""
                raise ShardingError(
                    f"budget={budget!r}: unit {unit.name} needs {need} bytes{beside}; give at least that"
                )
            for index, slot in enumerate(unit.layout.slots):
                self.pager.visit(unit, following)
                shown = unit.outside_graph(index)
                yield slot.name, shown
                # A loop holds it until it has the next one, and would hold the page beside those that come.
                set_data(shown, torch.empty(0, dtype=shown.dtype, device=shown.device))
        self.pager.release()

    def full_grad(self, which: nn.Parameter | str) -> torch.Tensor | None:
        """The whole gradient of a parameter, on every rank; None where no rank has one."""
        leaf = dict(self.model.named_parameters(remove_duplicate=False)).get(which) if isinstance(which, str) else which
        if not isinstance(leaf, ShardedParameter) or leaf.unit not in self.units:
            fix = "a parameter of this model or its name"
            raise wrong("full_grad(which)", which, "is not a parameter of this engine's model", fix)
        return self._whole_grads([leaf])[0]

    def full_grads(self) -> dict[str, torch.Tensor | None]:
        """All gradients by name, whole, on every rank. For looking at a model, not for training it."""
        leaves = {name: leaf for name, leaf in self.model.named_parameters() if isinstance(leaf, ShardedParameter)}
        return dict(zip(leaves, self._whole_grads(list(leaves.values())), strict=True))

    def _whole_grads(self, leaves: list[ShardedParameter]) -> list[torch.Tensor | None]:
        self.coordinator.flush_pending_gradients("a gradient was read")
        return together("the gradient", leaves, lambda: [_piece_of_gradient(leaf) for leaf in leaves])

    def state_dict(self, optimizer: Optimizer | None = None) -> dict[str, Any]:
        """`model.state_dict()` with sharded parameters, for torch.distributed.checkpoint.

        They show the model's memory. What is read into them reaches the model with `load_state_dict()`. With an
        optimizer: both, as `{"model": ..., "optimizer": ...}`, the optimizer's state by names of parameters."""
        if optimizer is not None:
            return {"model": self.state_dict(), "optimizer": named_state([optimizer], names_of(self.model))}
        self.saves_shards = True
        try:
            return self.model.state_dict()
        finally:
            self.saves_shards = False

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, optimizer: Optimizer | None = None
    ) -> Any:
        """Load a state dict with sharded or whole parameters. For all ranks together, as `model.load_state_dict()`.

        With an optimizer: what `state_dict(optimizer)` has."""
        if optimizer is None:
            return self.model.load_state_dict(state_dict, strict)
        numbered = numbered_state(state_dict["optimizer"], optimizer, names_of(self.model))
        result = self.model.load_state_dict(state_dict["model"], strict)
        optimizer.load_state_dict(numbered)
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over this engine's parameters."""
        not_negative("max_norm", max_norm, "a number, 0 or more")
        if not (isinstance(norm_type, str) and norm_type == "inf"):
            number("norm_type", norm_type, 'a number or "inf"')
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, float(norm_type))

    def explain(self) -> str:
        return explain(self.units, self.policy, self.grid)

    def report(self) -> str:
        return report(self.units, self.ledger, self.transport.rank, self.transport.world)


def _piece_of_gradient(leaf: ShardedParameter) -> torch.Tensor | None:
    leaf.unit.await_gradients()
    with without_torch_function():
        grad = raw_grad(leaf)
        return None if grad is None else plain(grad)
