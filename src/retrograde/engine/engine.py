"""The engine: the parts of one sharded model, wired together, and what users ask of them."""

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograde.comm import Kind, Mesh, Stamp, Station, streams_of
from retrograde.engine.describe import explain, report
from retrograde.engine.growth import Growth
from retrograde.errors import ShardingError
from retrograde.layout import Policy, parse_bytes
from retrograde.ledger import Ledger
from retrograde.optim import ShardedGradient, ShardedParameter
from retrograde.optim.pieces import raw_grad
from retrograde.reduction import Council, Exchange, Offers, Reducer
from retrograde.residency import BufferPool, Gate, Pager, Phase, SavedTensors, Unit

_graph_task = torch._C._current_graph_task_id


class _Norm(NamedTuple):
    of: "weakref.ref[torch.Tensor]"
    version: int
    order: float
    value: torch.Tensor


class Engine:
    """Made by `shard()`. The model's modules hold it, so it lives as long as the model."""

    def __init__(self, model: nn.Module, policy: Policy, mesh: Mesh, timeout: float) -> None:
        self.model, self.policy = model, policy
        self.units: list[Unit] = []
        self.growth = Growth()
        self.ledger = Ledger()
        self._steps = 0
        self._norms: dict[int, _Norm] = {}
        self.station = Station(mesh, self, timeout)
        self.council = Council(self.station, self, self.ledger)
        self.gate = Gate(self.station, self.units, self.fence)
        self.pager = Pager(policy)
        streams = streams_of(torch.device("cpu"))
        self._pages, self._buckets = BufferPool(self.ledger, streams), BufferPool(Ledger(), streams)
        exchange = Exchange(self.station, policy, self._buckets, self.ledger)
        self.reducer = Reducer(self.units, exchange, self.council, self.station, self.pager)
        self.reducer.until_step = policy.until_step
        self.saved = SavedTensors(self.pager)
        self.classes: dict[Any, type[nn.Module]] = {}
        self.modules: list[nn.Module] = []  # of the units

    def enlist(self, units: list[Unit]) -> None:
        """The units have their values: give them their graph and make their parameters leaves of it."""
        self.units.extend(units)
        sizes = sorted((unit.layout.page_bytes for unit in self.units), reverse=True)
        self._pages.limit = sum(sizes[: 2 if self.policy.prefetch else 1]) + self.policy.resident
        self._buckets.limit = sum(sizes[:2])
        for unit in units:
            unit.connect(self.gate, self.station, self.reducer, self._pages, self.ledger)
            for index, leaf in enumerate(unit.leaves):
                ShardedParameter.adopt(leaf, unit, index, self)
            self.saved.add(unit)
        self.council.values("shard() is done", None)  # from here on others may read our shards

    # ---- users
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside; the next backward outside takes them along."""
        self.reducer.recover()
        with self.reducer.windows.window(math.inf):
            yield

    @contextlib.contextmanager
    def coalesce(self, budget: int | float | str | None = None) -> Iterator[None]:
        """Keep the gradients of the backwards inside and reduce them once, at the end.

        `budget`: how many bytes of them may wait; what does not fit is reduced early, in its backward (0: everything).
        At stage 1 the end is the step, as always. If the body raises nothing is reduced and what was kept stays
        pending, as it would in `.grad`.
        """
        limit = math.inf if budget is None else parse_bytes(budget, "coalesce(budget)")
        self.reducer.recover()
        if sum(self.reducer.held.values()) > limit:
            self.council.flush("the start of coalesce(budget=...)")
        with self.reducer.windows.window(limit):
            yield
        self.reducer.recover()
        if not self.reducer.windows.open and not self.policy.until_step:
            self.council.flush("the end of coalesce()")

    @contextlib.contextmanager
    def full_params(self, *modules: nn.Module, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """The full tensors of the given modules (all, if none is given), by name, held while inside.

        With `write=True` edits in place are allowed, and every rank makes the same ones.
        """
        wanted = {id(p) for module in modules or (self.model,) for p in module.parameters()}
        held: dict[str, torch.Tensor] = {}
        with torch.set_grad_enabled(torch.is_grad_enabled() and not write):
            for name, leaf in self.model.named_parameters():
                if id(leaf) in wanted and isinstance(leaf, ShardedParameter):
                    held[name] = leaf.full()
            yield held if write else {name: tensor.detach() for name, tensor in held.items()}
        held.clear()
        for unit in self.units:
            unit.write_back_if_edited()
        self.pager.release()

    def iter_full_params(self, budget: int | str = "1GiB") -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, full tensor), a unit at a time; a tensor is valid until the next one is asked for."""
        limit = parse_bytes(budget, "budget")
        for unit in self.units:
            if unit.layout.page_bytes > limit and not unit.at_home:
                raise ShardingError(
                    f"budget={budget!r}: unit {unit.name} needs {unit.layout.page_bytes} bytes; give at least that, "
                    f"or shard with smaller units"
                )
            for index, slot in enumerate(unit.layout.slots):
                yield slot.name, self.access(unit, index).detach()
        self.pager.release()

    def full_grad(self, which: nn.Parameter | str) -> torch.Tensor | None:
        """The whole gradient of a parameter, on every rank; None where no rank has one."""
        return self._whole_grads([self._leaf(which)])[0]

    def full_grads(self) -> dict[str, torch.Tensor | None]:
        """All gradients by name, whole, on every rank. For looking at a model, not for training it."""
        named = [(name, leaf) for name, leaf in self.model.named_parameters() if isinstance(leaf, ShardedParameter)]
        whole = self._whole_grads([leaf for _, leaf in named])
        return {name: grad for (name, _), grad in zip(named, whole, strict=True)}

    def _whole_grads(self, leaves: list[ShardedParameter]) -> list[torch.Tensor | None]:
        self.before_grad_read()

        def pieces() -> list[torch.Tensor | None]:
            grads = [raw_grad(leaf) for leaf in leaves]
            return [None if grad is None else grad.detach().as_subclass(torch.Tensor).clone() for grad in grads]

        by_rank = self.council.fresh_values(f"whole gradients of {len(leaves)} parameters", pieces)
        whole: list[torch.Tensor | None] = []
        for leaf, *parts in zip(leaves, *by_rank, strict=True):
            present = [part for part in parts if part is not None]
            whole.append(torch.cat(present).view(leaf.slot.shape) if present else None)
        return whole

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over this engine's parameters."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def explain(self) -> str:
        return explain(self.units, self.policy, self.station.mesh.world)

    def report(self) -> str:
        return report(self.units, self.ledger, self.station.mesh.rank, self.station.mesh.world)

    def _leaf(self, which: nn.Parameter | str) -> ShardedParameter:
        for unit in self.units:
            for slot, leaf in zip(unit.layout.slots, unit.leaves, strict=True):
                if leaf is which or slot.name == which:
                    assert isinstance(leaf, ShardedParameter)
                    return leaf
        names = dict(self.model.named_parameters(remove_duplicate=False))
        if isinstance(which, str) and which in names:
            return self._leaf(names[which])  # a tied parameter under its other name
        raise ShardingError(f"{which!r} is not a parameter of this engine's model")

    # ---- leaves (Holder)
    def access(self, unit: Unit, slot: int) -> torch.Tensor:
        self.reducer.recover()
        return self.pager.access(unit, slot)

    def before_grad_read(self) -> None:
        """`.grad` shows what torch would: gradients still pending are reduced first."""
        self.reducer.recover()
        if self.reducer.pending and _graph_task() == -1:
            self.council.flush("p.grad was read")

    def before_grad_write(self, unit: Unit, slot: int) -> None:
        self.reducer.forget(unit, slot)

    def norms(self, tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Norms of whole parameters or gradients from their pieces.

        Code that loops over parameters asks one by one: the first question is answered for all of them.
        """
        if not all(self._known(tensor, order) for tensor in tensors):
            family = self._family(tensors)
            local = torch.stack([_power_sum(tensor, order) for tensor in family])
            combine = {math.inf: torch.maximum, -math.inf: torch.minimum}.get(order, torch.add)
            whole = functools.reduce(combine, self.everywhere(f"norm {order:g} of {len(family)} tensors", local))
            whole = whole if order == 0 or math.isinf(order) else whole ** (1.0 / order)
            self._norms = {
                id(t): _Norm(weakref.ref(t), t._version, order, value.to(t.dtype))
                for t, value in zip(family, whole.unbind(), strict=True)
            }
        return [self._norms[id(tensor)].value.clone() for tensor in tensors]

    def _known(self, tensor: torch.Tensor, order: float) -> bool:
        known = self._norms.get(id(tensor))
        return known is not None and known.of() is tensor and known[1:3] == (tensor._version, order)

    def _family(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [leaf for unit in self.units for leaf in unit.leaves]
        if isinstance(tensors[0], ShardedGradient):
            family = [grad for leaf in leaves if (grad := leaf.grad) is not None]
        else:
            family = list(leaves)
        known = {id(tensor) for tensor in family}
        return family if all(id(tensor) in known for tensor in tensors) else list(tensors)

    def everywhere(self, label: str, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        return self.council.values(label, value)

    # ---- optimizers (Stepped)
    def before_step(self) -> None:
        self.reducer.recover()
        self.pager.quiesce()
        self.council.step(f"step {self._steps + 1}")
        self.pager.release()
        self._pages.trim()  # the optimizer may have temporaries of its own
        self._buckets.trim()

    def after_step(self, leaves: list[ShardedParameter]) -> None:
        for leaf in leaves:
            if raw_grad(leaf) is not None:
                torch.autograd.graph.increment_version(leaf)  # an optimizer may write memory torch does not see
        self._steps += 1
        self._norms.clear()
        self.gate.end_step()
        self.pager.release()

    # ---- meetings (Member)
    def fence(self, what: str) -> None:
        self.pager.quiesce()
        self.council.fence(what)

    def offers(self) -> Offers:
        return self.reducer.offers()

    def join(self, offers: dict[int, Offers]) -> None:
        self.reducer.join(offers)

    def flush(self, offers: dict[int, Offers]) -> None:
        self.reducer.flush(offers)

    def advance(self, kind: Kind) -> None:
        self.reducer.advance(kind)
        self.gate.advance({Kind.STEP: Phase.STEP, Kind.FENCE: Phase.EDIT}.get(kind, Phase.READ))

    # ---- the service thread (Owner)
    def shard_for(self, unit: int, stamp: Stamp) -> torch.Tensor | str:
        reason = self.gate.admit(self.units[unit], stamp)
        return self.units[unit].shard if reason is None else reason

    def unit_name(self, unit: int) -> str:
        return self.units[unit].name


def _power_sum(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """In double precision, so that the order of adding pieces is not seen in the result's dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(torch.Tensor)
        wide = plain.double().abs()
        if math.isinf(order):
            start = torch.tensor(0.0 if order > 0 else math.inf, dtype=torch.float64)
            return torch.cat([wide, start[None]]).max() if order > 0 else torch.cat([wide, start[None]]).min()
        return wide.ne(0).double().sum() if order == 0 else wide.pow(order).sum()
