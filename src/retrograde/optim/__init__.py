"""What optimizers and users hold: leaves and gradients that are pieces, and the hooks around a step."""

from retrograde.optim.initializers import serve_initializers
from retrograde.optim.outside import refuse_pieces_outside
from retrograde.optim.pieces import ShardedGradient, ShardedParameter
from retrograde.optim.state import watch_states
from retrograde.optim.steps import watch_steps

__all__ = [
    "ShardedGradient",
    "ShardedParameter",
    "refuse_pieces_outside",
    "serve_initializers",
    "watch_states",
    "watch_steps",
]
