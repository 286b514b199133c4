"""Brings a loss that is on a device to all ranks of a pipeline: by the ways of the gradients, from stage to stage.

Every rank gets it from the rank of the stage after its own last one, and hands it on to those that get theirs from it.
So it needs no other connections than gradients do, and no host waits for its value.

    rank of the last stage ──> of the one before ──> ... ──> of the first
"""

from torch import Tensor

from retrograde.pipeline.schedule import Schedule
from retrograde.pipeline.transport import StageTransport
from retrograde.transport import Way
from retrograde.transport.messages import Address


def ways_of(schedule: Schedule) -> list[Way]:
    """The ways between ranks of neighbouring stages: one for outputs, one for gradients and the loss."""
    neighbours = zip(schedule.placement, schedule.placement[1:], strict=False)
    both = {way for one, other in neighbours if one != other for way in (Way(one, other), Way(other, one))}
    return sorted(both)


class LossPath:
    """One rank's part of the loss path."""

    def __init__(self, schedule: Schedule, rank: int, transport: StageTransport) -> None:
        self._transport = transport
        self._address = Address(True, schedule.last_stage, 0)  # free, as outputs of the last stage go to no other stage
        sources = {each: _source(schedule, each) for each in set(schedule.placement)}
        self._source = sources[rank]
        self._targets = sorted(each for each, source in sources.items() if source == rank)

    def share(self, own: Tensor | None) -> Tensor:
        """Return the loss of the step that has just ended. All ranks call this; that of the last stage gives `own`."""
        if self._source is None:
            assert own is not None
            loss = own
        else:
            (loss,) = self._transport.receive(self._source, self._address)()
        for target in self._targets:
            self._transport.send(target, self._address, [loss])
        return loss


def _source(schedule: Schedule, rank: int) -> int | None:
    """The rank from which this rank gets the loss; None if it holds the last stage."""
    last = max(schedule.stages_of(rank))
    return None if last == schedule.last_stage else schedule.placement[last + 1]
