"""retrograde: sharded training in which backward is free-form."""

from retrograde.compiling import compile
from retrograde.engine import Engine, shard
from retrograde.errors import DivergenceError, RetrogradeError, ShardingError, UnsupportedError
from retrograde.ledger import Event, Ledger

__all__ = [
    "DivergenceError",
    "Engine",
    "Event",
    "Ledger",
    "RetrogradeError",
    "ShardingError",
    "UnsupportedError",
    "compile",
    "shard",
]
