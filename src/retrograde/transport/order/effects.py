"""What the order asks of whoever drives it. Effects are carried out in the order in which they are returned."""

from dataclasses import dataclass
from enum import Enum, auto

from retrograde.transport.order.messages import MeetingPlace, OrderMessage
from retrograde.transport.order.sequence import CollectiveCall
from retrograde.transport.order.wants import Boundary, Want


class Role(Enum):
    """What this rank has to do with a call."""

    OWN = auto()  # its program wants it now
    PREFETCH = auto()  # a gather that its program is expected to want: the page is kept
    SPARE = auto()  # a gather that others wanted sooner than this rank: the page is kept
    ABSENT = auto()  # a courtesy to the others: a page is thrown away, to a sum it adds nothing


class Timer(Enum):
    """What an alarm is set for."""

    SURPRISE = auto()  # rank 0: for those who are not surprised yet
    NUDGES = auto()  # rank 0: for more nudges
    ROLL_CALL = auto()  # rank 0: for answers
    PARTIAL = auto()  # an inner node of the tree: for the rest of those below it
    OFFER = auto()  # a rank: for the others at the place of an invitation
    LIMIT = auto()  # a rank: for anything at all


@dataclass(frozen=True, slots=True)
class Alarm:
    """`timeout(alarm)` is to be called if for so many seconds on end `alarms()` has had this very one."""

    timer: Timer
    token: tuple[int, ...]  # tells one wait from the next
    seconds: float


@dataclass(frozen=True, slots=True)
class Issue:
    """Start this call on the communicator. `ordinal`: counts this rank's contributions to the unit in this period."""

    call: CollectiveCall
    role: Role
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """The page that was kept for this call, if any, will not be wanted."""

    call: CollectiveCall


@dataclass(frozen=True, slots=True)
class Serve:
    """What the program wants comes by this call, which has been issued. The program goes on."""

    call: CollectiveCall


@dataclass(frozen=True, slots=True)
class ServeOneSided:
    """Read the shards of the unit, or put the gradient to the owners. The program goes on."""

    want: Want
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """The program waits until a later effect lets it go on: Serve, ServeOneSided, Settle or Abort."""


@dataclass(frozen=True, slots=True)
class Settle:
    """All ranks have come to a boundary. Wait for every call that was issued, and for the gradients that were put.

    If `putters` has this rank it says to all owners how many it put; None: every rank does. Then gradients are
    complete, and the program steps if `boundary` is a step. When this rank's shards are at rest again, call `rest()`.
    """

    boundary: Boundary
    putters: tuple[int, ...] | None
    places: tuple[MeetingPlace, ...]  # all that ranks came to, one example of each


@dataclass(frozen=True, slots=True)
class Passed:
    """The boundary that the program came to has been passed, and it goes on."""

    boundary: Boundary


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a rank. Messages from one rank to another arrive in the order in which they were sent."""

    to: int
    message: OrderMessage


@dataclass(frozen=True, slots=True)
class Abort:
    """The order is of no further use: every wait ends with this cause."""

    cause: str


Effect = Issue | Drop | Serve | ServeOneSided | Sleep | Settle | Passed | Send | Abort
