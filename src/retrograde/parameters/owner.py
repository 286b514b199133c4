"""What a sharded parameter belongs to: its unit, and those of the engine that serve it."""

from dataclasses import dataclass

import torch

from retrograde.coordination import Coordinator
from retrograde.gradients import GradientFlow, PendingGradients, UnitGraph
from retrograde.pages import Pager, Unit


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Owner:
    """Kept by the engine; parameters refer to it weakly, so that a model that is let go of is gone.

    `place`, here: which of the unit's parameters is meant."""

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
        """All ranks' masters, put together."""
        return self._pager.masters(self.unit, place)

    def retire_page(self) -> None:
        """Who asked for it to stay needs it no longer."""
        self._pager.retire(self.unit)

    # ---- gradients
    def bring_gradients(self, why: str) -> None:
        """What torch would show in `.grad` now is there."""
        if not self._flow.at_rest:
            self.coordinator.flush_pending_gradients(why)

    @property
    def has_pending_gradients(self) -> bool:
        return self._pending.has(self.unit)

    def forget_gradient(self, place: int) -> None:
        """What is pending of it will not be added to `.grad`."""
        self._pending.forget(self.unit, place)

    def gradient_arrived(self, place: int) -> bool:
        """Did the last run of Pack have a gradient for it?"""
        return self._graph.arrived[place]

    def regather(self, place: int, piece: torch.Tensor) -> torch.Tensor:
        """The whole of a gradient that is part of a graph, as part of that graph."""
        return self._graph.regather(place, piece)
