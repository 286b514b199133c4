"""torch.compile for sharded models: where graphs begin and end, and how parameters enter them."""

from retrograde.compiling.backend import Services
from retrograde.compiling.regions import mark_regions, regions_of, without_regions
from retrograde.compiling.units import compile

__all__ = ["Services", "compile", "mark_regions", "regions_of", "without_regions"]
