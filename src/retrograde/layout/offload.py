"""What of a model that computes on an accelerator lives in the host's memory."""

from enum import Enum

from retrograde.arguments import wrong


class Offload(Enum):
    """What of a model on an accelerator is in the host's memory.

    `OPTIMIZER`: leaves (the masters, or the shards themselves), and so gradients and optimizer state.

    `PARAMETERS`: at stage 3 also what pages are made of, so that nothing of a parameter is on the device but its page
    while it is in use. At stages 1 and 2 pages stay on the device as they always do, and it is `OPTIMIZER`."""

    NOTHING = "nothing"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"

    @staticmethod
    def of(value: object) -> "Offload":
        """Read what `shard()` was given: None, a short name, or one of these."""
        if value is None:
            return Offload.NOTHING
        if isinstance(value, Offload):
            return value
        if isinstance(value, str) and value in (Offload.OPTIMIZER.value, Offload.PARAMETERS.value):
            return Offload(value)
        raise wrong("offload", value, "is not known", '"optimizer", "parameters" or None')
