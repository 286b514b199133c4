"""torch.compile for sharded models, unit by unit."""

from retrograde.compile.units import compile

__all__ = ["compile"]
