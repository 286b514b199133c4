"""Where the reduced gradient of a unit is made, and how it gets to where the leaves are: [Note: crossing] in
devices/streams.py."""

from collections.abc import Iterable

import torch

from retrograde.devices import HOST, Streams
from retrograde.gradients.gradient import Gradient, GradientState
from retrograde.pages import Unit


def memory_for_sum(unit: Unit, streams: Streams) -> torch.Tensor:
    """Memory for the reduced gradient of this rank's shard, which the reducing stream writes."""
    empty = streams.empty_for_host if unit.leaves_on_host else streams.empty_for_user
    return empty(unit.shard.numel(), unit.shard.dtype)


def let_go_of_sum(unit: Unit, streams: Streams) -> None:
    """Let go of a sum that will not be finished: its memory is free when the reducing stream has left it
    ([Note: producers], Rule 5)."""
    home = streams.crossing.returning if unit.leaves_on_host else streams.current()
    home.wait(streams.reducing.record())


def copy_of_sum(unit: Unit, total: torch.Tensor, streams: Streams) -> torch.Tensor:
    """A second copy of a reduced gradient, for another reader."""
    copied = memory_for_sum(unit, streams)
    streams.reducing.run(lambda: copied.copy_(total))
    streams.current().wait(streams.reducing.record())
    return copied


def landed(total: torch.Tensor, streams: Streams) -> torch.Tensor:
    """A copy of a reduced gradient in the host's memory, where the leaves are; it may still be on its way there."""
    if torch.is_grad_enabled():
        return total.to(HOST)  # as part of a graph; the host waits
    returning = streams.crossing.returning
    came = streams.crossing.pinned(total.numel(), total.dtype)
    returning.wait(streams.current().record())  # which has waited for the sum
    returning.run(lambda: came.copy_(total, non_blocking=True))
    streams.crossing.note(returning)
    return came


def land_together(gradients: Iterable[Gradient], streams: Streams) -> None:
    """Start copying to the host all sums for which Packs will ask:
    if the host has to wait for one, it waits for all."""
    if torch.is_grad_enabled():
        return  # each is part of a graph
    for gradient in gradients:
        waiting = gradient.state is GradientState.SUMMED and gradient.at_leaves is None
        if waiting and gradient.unit.leaves_on_host:
            gradient.at_leaves = landed(gradient.own, streams)
