"""One unit's gradient on this rank, from the backward that brings it to `.grad`.

[Note: the life of a gradient]

    FILLING ──> SENT ──> SUMMED ──> DELIVERED
       │          │
       └──────────┴──> GIVEN_UP

It is added up in a bucket, by one backward or by several (FILLING); every rank's part is on its way (SENT); all ranks'
parts have been added up (SUMMED); Pack has handed it to the leaves (DELIVERED). A backward that raises gives up what
it has sent and nobody has added up yet; what fills a bucket is given up when `.grad` is set by hand.
"""

from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch

from retrograde.gradients.bucket import Bucket
from retrograde.pages import Unit
from retrograde.transport import Key, Use, Uses


class GradientState(Enum):
    """Where a gradient is on its way: the drawing above."""

    FILLING = auto()
    SENT = auto()
    SUMMED = auto()
    DELIVERED = auto()
    GIVEN_UP = auto()


_NEXT = {
    GradientState.FILLING: {GradientState.SENT, GradientState.GIVEN_UP},
    GradientState.SENT: {GradientState.SUMMED, GradientState.GIVEN_UP},
    GradientState.SUMMED: {GradientState.DELIVERED},
    GradientState.DELIVERED: set[GradientState](),
    GradientState.GIVEN_UP: set[GradientState](),
}


class Sent(NamedTuple):
    """What a gradient has once it has been sent.

    `uses`: what this rank does with each parameter's gradient. `own`:
    memory for this rank's shard of it, which has the sum when SUMMED."""

    key: Key
    uses: Uses
    own: torch.Tensor


class Gradient:
    """One unit's gradient on this rank."""

    def __init__(self, unit: Unit, bucket: Bucket) -> None:
        self.unit = unit
        self.bucket = bucket
        self.state = GradientState.FILLING
        self.went_early = False  # it waited in a window, and was sent early to make room for others
        self.seen_at_once = False  # is it seen in its backward: captured, by a hook, or as part of a graph?
        self.reached = (False,) * len(self.unit.leaves)  # the parameters whose .grad this rank's Pack adds to
        self.wanted = self.reached  # when SUMMED: those whose gradients go to .grad, on any rank
        self.at_leaves: torch.Tensor | None = None  # when SUMMED: where the leaves are, if that is elsewhere
        self._sent: Sent | None = None

    # ---- transitions
    def _become(self, state: GradientState) -> None:
        if state not in _NEXT[self.state]:
            now = self.state.name
            raise RuntimeError(f"a gradient of unit {self.unit.name} cannot become {state.name}: it is {now}")
        self.state = state

    def send(self, key: Key, uses: Uses, own: torch.Tensor) -> None:
        """Note that the gradient goes to the other ranks under `key`.
        `own` becomes the reduced gradient of this rank's shard."""
        self._become(GradientState.SENT)
        self._sent = Sent(key, uses, own)

    def sum_up(self, wanted: tuple[bool, ...]) -> None:
        self._become(GradientState.SUMMED)
        self.wanted = wanted

    def deliver(self) -> None:
        self._become(GradientState.DELIVERED)

    def give_up(self) -> None:
        self._become(GradientState.GIVEN_UP)

    def forget(self, slot: int) -> None:
        """Forget what the bucket has for a parameter whose `.grad` was set by hand.
        If nothing is left, give up the gradient."""
        self.bucket.forget(slot)
        if self.bucket.empty:
            self.give_up()
            self.bucket.discard()

    def miss_pack(self) -> None:
        """Note that Pack has run before the sum was there: all of it goes to `.grad` later."""
        self.reached = (False,) * len(self.unit.leaves)

    # ---- of one that was sent
    @property
    def _as_sent(self) -> Sent:
        if self._sent is None:
            raise RuntimeError(f"a gradient of unit {self.unit.name} has not been sent: it is {self.state.name}")
        return self._sent

    @property
    def key(self) -> Key:
        return self._as_sent.key

    @property
    def own(self) -> torch.Tensor:
        return self._as_sent.own

    @property
    def uses(self) -> Uses:
        return self._as_sent.uses

    # ---- of one that was summed
    @property
    def packed(self) -> tuple[bool, ...]:
        """The parameters for which Pack has a gradient: those captured here, and those to whose `.grad` it adds."""
        each = zip(self.uses, self.delivered_by_pack, strict=True)
        return tuple(use is Use.CAPTURED or delivered for use, delivered in each)

    @property
    def delivered_by_pack(self) -> tuple[bool, ...]:
        return tuple(wanted and reached for wanted, reached in zip(self.wanted, self.reached, strict=True))

    @property
    def left_over(self) -> tuple[bool, ...]:
        """The parameters whose gradients go to `.grad` though Pack does not add them: `inputs=` leaves them out on this
        rank, or they are captured."""
        return tuple(wanted and not reached for wanted, reached in zip(self.wanted, self.reached, strict=True))


class Delivery(NamedTuple):
    """A reduced gradient that no Pack of this rank waits for, and which parameters it is for."""

    unit: Unit
    total: torch.Tensor
    wanted: tuple[bool, ...]


class Leaves(Protocol):
    """A unit's way to `.grad` (graph.py)."""

    def deliver(self, total: torch.Tensor, wanted: tuple[bool, ...]) -> None:
        """Add a reduced gradient to `.grad` of the wanted parameters, as a backward would."""


def uses_of(bucket: Bucket) -> Uses:
    """The uses of a gradient that waited: whatever is there goes to `.grad`."""
    return tuple(Use.ACCUMULATED if present else Use.NONE for present in bucket.present)
