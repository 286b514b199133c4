"""What a sharded parameter belongs to: its unit, and those of the engine that serve it."""

from dataclasses import dataclass

from retrograde.coordination import Coordinator
from retrograde.gradients import GradientFlow, UnitGraph
from retrograde.pages import Pager, Unit


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Owner:
    """Kept by the engine; parameters refer to it weakly, so that a model that is let go of is gone."""

    unit: Unit
    pager: Pager
    flow: GradientFlow
    coordinator: Coordinator
    graph: UnitGraph
