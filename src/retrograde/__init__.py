"""retrograde: sharded training in which backward is free-form.

docs/design/README.md has a map of the rooms. In short: `layout` decides how parameters are cut (and has the policies of
stages 1, 2, 3), `devices` has streams, `transport` reaches other ranks, `pages` has full parameters, `gradients`
reduces, `coordination` decides when ranks meet, `parameters` has the leaves, `engine` puts it together (`shard()`).
"""

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
