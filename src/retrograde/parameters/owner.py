"""What a sharded parameter belongs to: its unit, and those parts of the engine that serve it."""

from dataclasses import dataclass

import torch

from retrograde.coordination import Coordinator
from retrograde.gradients import GradientFlow, PendingGradients, UnitGraph
from retrograde.pages import Pager, Unit


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Owner:
    """The unit of sharded parameters and the engine's parts that serve them.

    The engine keeps it and parameters refer to it weakly, so that parameters do not keep a model alive. `place` says
    which of the unit's parameters is meant."""

    unit: Unit
    coordinator: Coordinator
    _pager: Pager
    _flow: GradientFlow
    _pending: PendingGradients
    _graph: UnitGraph

    # ---- weights
    def shown(self, place: int) -> torch.Tensor:
        """The full tensor, in the graph of the parameter."""
        return self._pager.full(self.unit, place)

    def masters(self, place: int) -> torch.Tensor:
        """The whole of a parameter's masters, from all ranks."""
        return self._pager.masters(self.unit, place)

    def retire_page(self) -> None:
        """Tell the pager that a caller who needed the page no longer does."""
        self._pager.retire(self.unit)

    # ---- gradients
    def bring_gradients(self, why: str) -> None:
        """Reduce pending gradients, so that `.grad` has what it would have in torch now."""
        if not self._flow.at_rest:
            self.coordinator.flush_pending_gradients(why)

    @property
    def has_pending_gradients(self) -> bool:
        return self._pending.has(self.unit)

    def forget_gradient(self, place: int) -> None:
        """Forget the pending gradient of one parameter, so that it is not added to `.grad`."""
        self._pending.forget(self.unit, place)

    def gradient_arrived(self, place: int) -> bool:
        """Did the last run of Pack have a gradient for this parameter?"""
        return self._graph.arrived[place]

    def note_hooks(self, place: int) -> None:
        """Note that the hooks of this parameter are called, which may raise."""
        self._graph.hooks_ran.add(place)

    def regather(self, place: int, piece: torch.Tensor) -> torch.Tensor:
        """Gather the whole of a gradient that is part of a graph, in that graph."""
        return self._graph.regather(place, piece)
