"""torch.compile for sharded models: where graphs begin and end, and how parameters enter them."""

from retrograde.compile.regions import mark_regions, regions_of
from retrograde.compile.units import compile

__all__ = ["compile", "mark_regions", "regions_of"]
