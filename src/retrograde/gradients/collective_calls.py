"""The kinds of collective by which gradients are reduced: an exchange of parts, and a sum by the backend.

With replicas an exchange is of another kind: replica_calls.py."""

from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch

from retrograde.gradients.sums import Summand
from retrograde.pages import Unit
from retrograde.transport import GradientWant, OrderedTransport, Work


class Attendance(Enum):
    """Did every rank bring a part to a call?"""

    UNKNOWN = auto()  # nobody has looked yet
    ALL = auto()  # or nobody needs to know who was absent
    SOME = auto()


class StartedCall(NamedTuple):
    """A call under way. `apart`: the memory of what it brings that is still to be added up, or of the sum."""

    work: Work
    apart: torch.Tensor


class CallKind(Protocol):
    """How a call brings what all ranks have of a gradient to the owners of its shards."""

    comes_later: bool  # as `Strategy.comes_later`
    brings_sum: bool  # not parts: it may go straight to where the sum belongs

    def numel(self, unit: Unit) -> int:
        """How many elements the memory `brought` has that `start` is given."""

    def start(self, want: GradientWant, unit: Unit, sent: torch.Tensor, brought: torch.Tensor) -> StartedCall | None:
        """Start the call. None: this rank has strayed from the order, and takes no part in it."""

    def attendance(self, want: GradientWant) -> Attendance:
        """Whether every rank brings a part, as far as that is known when the call starts."""

    def summands(self, apart: torch.Tensor, unit: Unit) -> list[Summand]:
        """What of `apart` is still to be added up, in order."""


class Exchange:
    """Implements `CallKind`: every rank's part of this rank's shard comes apart, and they are added up here."""

    comes_later = False
    brings_sum = False

    def __init__(self, transport: OrderedTransport) -> None:
        self._transport = transport

    def numel(self, unit: Unit) -> int:
        return unit.layout.padded_numel

    def start(self, want: GradientWant, unit: Unit, sent: torch.Tensor, brought: torch.Tensor) -> StartedCall | None:
        work = self._transport.exchange(want, sent, brought)
        return None if work is None else StartedCall(work, brought)

    def attendance(self, want: GradientWant) -> Attendance:
        """ALL after a meeting, since nobody is absent there, and in a world of one rank; else nobody knows yet."""
        nobody_is_absent = want.at_meeting or self._transport.world == 1
        return Attendance.ALL if nobody_is_absent else Attendance.UNKNOWN

    def summands(self, apart: torch.Tensor, unit: Unit) -> list[Summand]:
        """The ranks' parts of this rank's shard, in rank order."""
        return shards_of(apart, unit)


def shards_of(flat: torch.Tensor, unit: Unit) -> list[Summand]:
    """Cut `flat` into pieces of the size of a shard."""
    numel = unit.shard.numel()
    return [[part] for part in flat.view(-1, numel)] if numel else [[flat]]


class BackendSum:
    """Implements `CallKind`: the backend adds up the ranks' parts, and its sum does not show who was absent
    (collective_sum.py, Rule 4)."""

    comes_later = True
    brings_sum = True

    def __init__(self, transport: OrderedTransport) -> None:
        self._transport = transport

    def numel(self, unit: Unit) -> int:
        return unit.shard.numel()

    def start(self, want: GradientWant, unit: Unit, sent: torch.Tensor, brought: torch.Tensor) -> StartedCall | None:
        work = self._transport.add_up(want, sent, brought)
        return None if work is None else StartedCall(work, brought)

    def attendance(self, want: GradientWant) -> Attendance:
        return Attendance.ALL

    def summands(self, apart: torch.Tensor, unit: Unit) -> list[Summand]:
        """The sum itself, as the only summand."""
        return [[apart]]
