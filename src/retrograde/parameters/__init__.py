"""What optimizers and users hold: leaves, gradients and optimizer state that are sharded, and updates of them."""

from retrograde.parameters.elementwise import elementwise, per_parameter
from retrograde.parameters.leaf import ShardedParameter
from retrograde.parameters.outside import refuse_pieces_outside
from retrograde.parameters.owner import Owner
from retrograde.parameters.questions import full_tensor, parameter_of
from retrograde.parameters.sharded_tensor import ShardedGradient, ShardedTensor, classes_of_sharded_tensors
from retrograde.parameters.state import watch_states
from retrograde.parameters.updates import watch_updates

__all__ = [
    "Owner",
    "ShardedGradient",
    "ShardedParameter",
    "ShardedTensor",
    "classes_of_sharded_tensors",
    "elementwise",
    "full_tensor",
    "parameter_of",
    "per_parameter",
    "refuse_pieces_outside",
    "watch_states",
    "watch_updates",
]
