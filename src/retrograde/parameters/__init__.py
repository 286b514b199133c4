"""What optimizers and users hold: leaves and gradients that are pieces, and the hooks around a step."""

from retrograde.parameters.initializers import serve_initializers
from retrograde.parameters.outside import refuse_pieces_outside
from retrograde.parameters.owner import Owner
from retrograde.parameters.pieces import ShardedGradient, ShardedParameter
from retrograde.parameters.state import watch_states
from retrograde.parameters.steps import watch_steps

__all__ = [
    "Owner",
    "ShardedGradient",
    "ShardedParameter",
    "refuse_pieces_outside",
    "serve_initializers",
    "watch_states",
    "watch_steps",
]
