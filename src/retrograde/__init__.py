"""retrograde: sharded training in which backward is free-form."""

from retrograde.checkpoint import export, load, load_pretrained, save
from retrograde.compiling import compile
from retrograde.engine import Engine, shard
from retrograde.errors import (
    CheckpointError,
    DivergenceError,
    PipelineError,
    RetrogradeError,
    ShardingError,
    StateError,
    UnsupportedError,
)
from retrograde.layout import Offload, Precision
from retrograde.ledger import Entry, Ledger
from retrograde.parameters import elementwise, full_tensor, parameter_of, per_parameter
from retrograde.pipeline.fused import defer
from retrograde.pipeline.options import Cut, Microbatches, Zero
from retrograde.pipeline.pipeline import Pipeline

__all__ = [
    "CheckpointError",
    "Cut",
    "DivergenceError",
    "Engine",
    "Entry",
    "Ledger",
    "Microbatches",
    "Offload",
    "Pipeline",
    "PipelineError",
    "Precision",
    "RetrogradeError",
    "ShardingError",
    "StateError",
    "UnsupportedError",
    "Zero",
    "compile",
    "defer",
    "elementwise",
    "export",
    "full_tensor",
    "load",
    "load_pretrained",
    "parameter_of",
    "per_parameter",
    "save",
    "shard",
]
