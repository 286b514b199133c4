"""The engine: the parts of one sharded model, wired together, and what users ask of them."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from retrograde.arguments import flag, instance, not_negative, number, wrong
from retrograde.devices import streams_of
from retrograde.errors import ShardingError
from retrograde.gradients import Exchange, Reducer
from retrograde.layout import Policy, parse_bytes
from retrograde.ledger import Ledger
from retrograde.pages import BufferPool, Pager, SavedTensors, Unit
from retrograde.parameters import ShardedParameter
from retrograde.parameters.part import plain, whole
from retrograde.parameters.pieces import raw_grad
from retrograde.reports import explain, report
from retrograde.transport import Reason, Station


class Engine:
    """Made by `shard()`. The model's modules hold it, so it lives as long as the model."""

    grow: Callable[[], None]  # shards parameters that have joined the model since it was last called

    def __init__(self, model: nn.Module, policy: Policy, station: Station) -> None:
        self.model, self.policy, self.station = model, policy, station
        self.units: list[Unit] = []
        self.ledger = Ledger()
        streams = streams_of(torch.device("cpu"))
        self._pages, self._buckets = BufferPool(self.ledger, streams), BufferPool(Ledger(), streams)
        self.pager = Pager(policy, self._pages)
        exchange = Exchange(station, policy, self._buckets, self.ledger)
        self.reducer = Reducer(self.units, exchange, station, self.pager, self.ledger)
        self.saved = SavedTensors(self.pager)

    def enlist(self, units: list[Unit]) -> None:
        """The units have their values: give them their graph and make their parameters leaves of it."""
        self.units.extend(units)
        sizes = sorted((unit.layout.page_bytes for unit in self.units), reverse=True)
        self._pages.limit = sum(sizes[: 2 if self.policy.prefetch else 1]) + self.policy.resident
        self._buckets.limit = sum(sizes[:2])
        for unit in units:
            unit.connect(self.reducer.gate, self.reducer, self._pages)
            for index, leaf in enumerate(unit.leaves):
                ShardedParameter.adopt(leaf, unit, index)
        self.reducer.council.values("shard() is done", lambda: None)  # from here on others may read our shards

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
            self.reducer.council.attend(Reason.FLUSH, "the start of coalesce(budget=...)")
        with self.reducer.windows.window(limit):
            yield
        self.reducer.recover()
        if not self.reducer.windows.open and not self.policy.until_step:
            self.reducer.council.attend(Reason.FLUSH, "the end of coalesce()")

    @contextlib.contextmanager
    def full_params(self, *modules: nn.Module, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """The full tensors of the given modules (all, if none is given), by name, held while inside.

        With `write=True` edits in place are allowed, and every rank makes the same ones.
        """
        flag("full_params(write)", write)
        wanted = {id(p) for module in self._own(modules) for p in module.parameters()}
        leaves = [(name, p) for name, p in self.model.named_parameters() if id(p) in wanted]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not write):
            held = {name: leaf.full() for name, leaf in leaves if isinstance(leaf, ShardedParameter)}
            yield held if write else {name: tensor.detach() for name, tensor in held.items()}
        held.clear()
        for unit in self.units:
            unit.write_back_if_edited()
        self.pager.release()

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
        """Stream (name, full tensor), a unit at a time; a tensor is valid until the next one is asked for."""
        return self._stream(budget, parse_bytes(budget, "iter_full_params(budget)"))

    def _stream(self, budget: int | str, limit: float) -> Iterator[tuple[str, torch.Tensor]]:
        for unit in self.units:
            if (need := unit.layout.page_bytes) > limit and not unit.at_home:
                raise ShardingError(f"budget={budget!r}: unit {unit.name} needs {need} bytes; give at least that")
            for index, slot in enumerate(unit.layout.slots):
                yield slot.name, self.reducer.full(unit, index).detach()
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
        self.reducer.settle("a gradient was read")
        return whole("the gradient", leaves, lambda: (g if g is None else plain(g) for g in map(raw_grad, leaves)))

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over this engine's parameters."""
        not_negative("max_norm", max_norm, "a number, 0 or more")
        if not (isinstance(norm_type, str) and norm_type == "inf"):
            number("norm_type", norm_type, 'a number or "inf"')
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, float(norm_type))

    def explain(self) -> str:
        return explain(self.units, self.policy, self.station.mesh.world)

    def report(self) -> str:
        return report(self.units, self.ledger, self.station.mesh.rank, self.station.mesh.world)
