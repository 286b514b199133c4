"""Meetings, as they are seen by people: in the ledger and in profiles."""

from collections.abc import Callable

from retrograde.labels import labelled
from retrograde.ledger import Activity, Ledger
from retrograde.transport import Position, Transport


class Meetings:
    """The meetings of one engine, each noted in the ledger and in profiles."""

    def __init__(self, transport: Transport, ledger: Ledger) -> None:
        self._transport = transport
        self._ledger = ledger

    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        """Wait until every rank has come to its next meeting; returns everybody's position, by rank."""
        name = position.reason.name.lower()
        self._ledger.record(Activity.AGREE, name)
        with labelled("meeting:", name):
            return self._transport.meet(position, anew)
