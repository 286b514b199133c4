"""What ranks say to each other about the order. Typed, bounded, and small; how they travel is the transport's affair.

*Up*, from a rank or from all ranks at and below one (`count` says how many), towards rank 0. *Down*, from rank 0 to
all.
Whatever is said about a period names it. What goes up of one kind can be merged, and a later one from the same rank
replaces an earlier one (verdicts.py).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from retrograde.transport.order.wants import Boundary, Gather, Want
from retrograde.transport.records import Count, Record

MOST_TEXT = 2000
Text = Annotated[str, Meta(max_length=MOST_TEXT)]


# ---- parts of messages
class Usage(Record, frozen=True):
    """How often something was wanted of a unit; `uses` is a sum over what its reductions were for."""

    gathers: Count = 0
    reductions: Count = 0
    uses: Count = 0


class Tally(Record, frozen=True):
    """A unit's usage on several ranks. `denied`: some rank was surprised by it, in vain."""

    unit: Count
    least: Usage
    most: Usage
    denied: bool


class MeetingPlace(Record, frozen=True):
    """Where ranks have come to; `rank` is the first of them."""

    rank: Count
    boundary: Boundary
    name: Text


# ---- up
class Surprise(Record, frozen=True, tag="surprise"):
    """At this length of W these ranks want something that was not foreseen; None: not all the same."""

    period: Count
    count: Count
    length: Count
    want: Want | None


class Nudge(Record, frozen=True, tag="nudge"):
    """These ranks wait for a call that every rank has issued when its W has `length`. The one that says so will have
    issued in advance what is expected up to `until` if it leaves."""

    period: Count
    count: Count
    length: Count
    until: Count


class Arrive(Record, frozen=True, tag="arrive"):
    """These ranks have come to a boundary; `offers` more would end the period here if all others do (invitations).

    `length`: of the longest W. `quiet`: no rank has contributed to a reduction. `digest`: of how often each unit was
    used; None if ranks differ. `putters`: who put gradients one-sidedly; None if too many to name. `tallies`: what was
    asked for about the period before.
    """

    period: Count
    count: Count
    offers: Count
    invitation: Count
    length: Count
    quiet: bool
    denied: bool
    digest: int | None
    putters: tuple[Count, ...] | None
    places: tuple[MeetingPlace, ...]
    tallies: tuple[Tally, ...]


class Invite(Record, frozen=True, tag="invite"):
    """Could all ranks come together where they next want this? This rank has been one-sided for long, `turn` times."""

    period: Count
    turn: Count
    want: Gather


class Withdraw(Record, frozen=True, tag="withdraw"):
    """A rank has waited long enough at the place of an invitation."""

    period: Count
    invitation: Count


class Overdue(Record, frozen=True, tag="overdue"):
    """This rank has waited beyond the limit."""

    rank: Count
    where: Text


class Here(Record, frozen=True, tag="here"):
    """The answer to a roll call."""

    rank: Count
    period: Count
    length: Count
    where: Text


class RankFailed(Record, frozen=True, tag="fail"):
    """This rank is of no further use."""

    text: Text


# ---- down
class Grant(Record, frozen=True, tag="grant"):
    """All ranks want this at this length of W: it is the next entry."""

    period: Count
    length: Count
    want: Want


class Close(Record, frozen=True, tag="close"):
    """No more grants in this period. Every rank's W grows to `length`, and that of a rank which leaves to `until`.
    `lead`: those who nudged leave."""

    period: Count
    length: Count
    until: Count
    lead: bool


class Go(Record, frozen=True, tag="go"):
    """All have arrived. W grows to `length` everywhere, then by `boundary`.

    `putters`: whose one-sided gradients are to be waited for; None: everybody's. `volatile`: units that are one-sided
    for all ranks from now on, None if they are what they were. `tally`: say at the next boundary how this period was.
    """

    period: Count
    boundary: Boundary
    length: Count
    putters: tuple[Count, ...] | None
    volatile: tuple[Count, ...] | None
    tally: bool
    places: tuple[MeetingPlace, ...]


class Invitation(Record, frozen=True, tag="invitation"):
    """Where you next want this, offer to end the period."""

    period: Count
    number: Count
    want: Gather


class Decline(Record, frozen=True, tag="decline"):
    """This invitation is over: go on."""

    period: Count
    number: Count


class RollCall(Record, frozen=True, tag="roll call"):
    """Say where you are."""


class OrderFailed(Record, frozen=True, tag="failed"):
    """The order is of no further use, on any rank."""

    text: Text


Up = Surprise | Nudge | Arrive | Invite | Withdraw | Overdue | Here | RankFailed
Down = Grant | Close | Go | Invitation | Decline | RollCall | OrderFailed
OrderMessage = Up | Down
# Somebody waits, in vain if the receiver is gone. (A call that is nudged for it may have issued before.)
NeedsAnswer = Surprise | Arrive | Overdue | RollCall

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[OrderMessage] = msgspec.msgpack.Decoder(OrderMessage)


def encode(message: OrderMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> OrderMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError for whatever is no message."""
    return _decoder.decode(data)


def shortened(text: str) -> str:
    """As much of a text as a message may carry."""
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."
