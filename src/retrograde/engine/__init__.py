"""`shard()` and what it returns."""

from retrograde.engine.engine import Engine
from retrograde.engine.shard import shard

__all__ = ["Engine", "shard"]
